"""``async-rl plan``: from options and a configuration to scenarios, and the answer.

CONFIG, --from RUN, stated speeds (they win) ─► Scenario ─► candidates.search ─► table, words, FILE.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from async_rl.config import AnyConfig, Config, load_any
from async_rl.errors import ConfigError
from async_rl.lengths import Lengths
from async_rl.plan.candidates import Plan, actor_counts, bounds_of, search
from async_rl.plan.measured import Measured, measure
from async_rl.plan.scenario import Scenario, Speeds, scenario
from async_rl.plan.words import assumptions, sentences, show
from async_rl.runfolder import write_atomically

_ASSUMED = 4
"""Where nothing says how long answers are, their median is this part of the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What the command line says; ``None``: nothing."""

    tokens_per_s: float | None = None
    slot_tokens_per_s: float | None = None
    step_s: float | None = None
    publish_s: float | None = None
    weights_s: float | None = None
    pause_s: float | None = None
    filtered: float | None = None
    lengths: str | None = None
    median: int | None = None
    ranks: int | None = None


def run_plan(
    source: str,
    overrides: Sequence[str],
    stated: Stated,
    actors: str,
    run: Path | None,
    imbalance: bool,
    out: Path | None,
) -> Plan:
    """Plan, print, and write ``out``.

    Args:
        source: preset or file.
        overrides: settings.
        stated: speeds; they win over those of ``run``.
        actors: a number, or ``search``.
        run: folder of a run whose speeds are taken.
        imbalance: whether ranks wait for the fullest one.
        out: JSON file.

    Raises:
        ConfigError: something is missing or out of range; says what.
    """
    config = load_any(source, overrides)
    if config.actors.colocated:
        raise ConfigError(
            "actors.placement = 'colocated': both sides take turns on one device, there is no ratio to plan"
        )
    measured = measure(run) if run is not None else None
    ranks = stated.ranks or config.learner.ranks
    base = scenario(
        config,
        speeds=_speeds(config, stated, measured, ranks),
        lengths=_lengths(config, stated, measured),
        actors=1 if actors == "search" else _number(actors),
        ranks=ranks,
        imbalance=imbalance,
    )
    unit = "tokens" if isinstance(config, Config) else "env steps"
    Console().print(f"Counted with {assumptions(base, unit)}.", highlight=False)
    plan = search(base, actor_counts(base) if actors == "search" else [base.actors], bounds_of(base))
    show(plan, unit)
    if out is not None:
        write_atomically(out, json.dumps(document(plan, base, unit), indent=1) + "\n")
    return plan


def document(plan: Plan, base: Scenario, unit: str) -> dict[str, Any]:
    """The plan for JSON."""
    rows: list[Mapping[str, Any]] = [
        {
            "actors": row.scenario.actors,
            "ranks": row.scenario.ranks,
            "max_staleness": row.bound,
            **row.outcome.to_plain(),
            "tokens_per_s": round(row.tokens_per_s, 2),
            "of_ideal": round(row.of_ideal, 4),
            "thinned": row.thinned,
        }
        for row in plan.rows
    ]
    return {
        "unit": unit,
        "speeds": asdict(base.speeds),
        "slots": base.slots,
        "groups_per_step": base.rules.groups_per_step,
        "group_size": base.rules.group_size,
        "mean_length": base.lengths.mean(),
        "balanced_actors": base.balanced_actors,
        "weight_updates": base.weight_updates,
        "rows": rows,
        "choice": rows[plan.rows.index(plan.choice)],
        "words": sentences(plan, unit),
    }


def _number(actors: str) -> int:
    if not actors.isdecimal():
        raise ConfigError(f"--actors {actors!r}: a number, or search")
    return int(actors)


def _speeds(config: AnyConfig, stated: Stated, measured: Measured | None, ranks: int) -> Speeds:
    """What is stated, else measured; a step that was measured with other ranks is taken to share its work equally."""
    slots = config.actors.slots if isinstance(config, Config) else 1
    speeds = measured.speeds if measured else None
    if stated.tokens_per_s is not None and stated.slot_tokens_per_s is not None:
        raise ConfigError("--tokens-per-s and --slot-tokens-per-s say the same of an actor and of a slot: give one")
    slot = stated.slot_tokens_per_s
    if stated.tokens_per_s is not None:
        slot = stated.tokens_per_s / slots
    elif slot is None and speeds is not None:
        slot = speeds.slot_tokens_per_s
    elif slot is None and isinstance(config, Config) and config.actors.engine == "mock":
        slot = config.actors.mock_speed
    if slot is None:
        raise ConfigError(
            "how fast is an actor? Give --tokens-per-s (all slots full), --slot-tokens-per-s, or --from RUN"
        )
    step_s = stated.step_s
    if step_s is None and measured is not None:
        step_s = measured.speeds.step_s * measured.ranks / ranks
    if step_s is None:
        raise ConfigError("how long does a step of the learner take? Give --step-s, or --from RUN")
    rest = {
        name: (getattr(speeds, name) if speeds else 0.0) if (given := getattr(stated, name)) is None else given
        for name in ("publish_s", "weights_s", "pause_s", "filtered")
    }
    return Speeds(slot_tokens_per_s=slot, step_s=step_s, **rest)


def _lengths(config: AnyConfig, stated: Stated, measured: Measured | None) -> Lengths:
    if not isinstance(config, Config):
        return Lengths(kind="constant", median=config.env.horizon * config.env.num_envs)
    actors, longest = config.actors, config.max_sampled
    if stated.median is not None and not 1 <= stated.median <= longest:
        raise ConfigError(f"--median {stated.median}: between 1 and the longest answer, {longest}")
    if stated.lengths is None and stated.median is None:
        if measured is not None and measured.lengths is not None:
            return measured.lengths
        if actors.engine == "mock":
            spread = actors.mock_spread
            return Lengths.parse(actors.mock_lengths, median=actors.mock_tokens, p99_over_p50=spread, longest=longest)
    median = stated.median or max(1, longest // _ASSUMED)
    return Lengths.parse(stated.lengths or "lognormal", median=median, longest=longest)
