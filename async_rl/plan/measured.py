"""The speeds of a run that was made, from its folder.

timeline.jsonl ─► seconds in which actors generated ─┬─► tokens a second of a slot
books.json ─► tokens, groups, weights ───────────────┤
metrics.jsonl ─► seconds of a step, of publishing ───┴─► Measured
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from async_rl.config import AnyConfig, Config, load_any
from async_rl.errors import ConfigError
from async_rl.lengths import Lengths, read_lengths
from async_rl.plan.scenario import Speeds
from async_rl.report.trace import roles, spans_by_process
from async_rl.report.usage import seconds_per_state
from async_rl.runfolder import RunFolder

_START_STEPS = 2
"""Steps of a run that are left out: the first ones compile and fill caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run was like."""

    speeds: Speeds
    lengths: Lengths | None
    """``None``: the run kept no samples."""
    ranks: int
    """Of its learner: the step was measured with so many."""


def measure(folder: Path) -> Measured:
    """Read a run folder.

    Raises:
        ConfigError: it is none, or the run has not come far enough; says what is missing.
    """
    run = RunFolder(folder)
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"--from {folder}: no run folder, there is no config.toml in it")
    config = load_any(str(folder / "config.toml"))
    rows, books = run.metrics[_START_STEPS:], run.books
    learn_s = [row["time/learn_s"] for row in rows if row.get("time/learn_s")]
    generated = (books.get("tokens") or {}).get("generated", 0)
    seconds = _generating_s(run)
    if not learn_s or not generated or seconds <= 0:
        what = "step" if not learn_s else "generated token"
        raise ConfigError(
            f"--from {folder}: the run shows no {what} behind the first {_START_STEPS} steps; let it go on"
        )
    publish_s = [row["time/publish_s"] for row in rows if row.get("time/publish_s") is not None]
    weights, ended = books.get("weights") or {}, books.get("books") or {}
    filtered, trained = ended.get("filtered", 0), ended.get("trained", 0)
    slots = config.actors.slots if isinstance(config, Config) else 1
    speeds = Speeds(
        slot_tokens_per_s=generated / seconds / slots,
        step_s=statistics.median(learn_s),
        publish_s=statistics.median(publish_s) if publish_s else 0.0,
        weights_s=weights.get("transfer_s") or 0.0,
        pause_s=weights.get("pause_s") or 0.0,
        filtered=filtered / (filtered + trained) if filtered else 0.0,
    )
    return Measured(speeds=speeds, lengths=_lengths(run, config, folder), ranks=config.learner.ranks)


def _generating_s(run: RunFolder) -> float:
    """Seconds, summed over the actors."""
    timeline = run.timeline
    role_of = roles(timeline)
    return sum(
        seconds_per_state(spans).get("generating", 0.0)
        for name, spans in spans_by_process(timeline).items()
        if role_of[name] == "actor"
    )


def _lengths(run: RunFolder, config: AnyConfig, folder: Path) -> Lengths | None:
    """The spread of the sampled texts around the mean length in tokens."""
    means = [row["length/generated"] for row in run.metrics if row.get("length/generated")]
    if not isinstance(config, Config) or not means or not run.samples:
        return None
    texts = read_lengths(folder)
    scale = means[-1] * len(texts) / sum(texts)
    return Lengths(kind="recorded", recorded=tuple(max(1, round(n * scale)) for n in texts), longest=config.max_sampled)
