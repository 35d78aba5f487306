"""Which numbers of actors and which bounds are looked at, and which of them is recommended.

Scenario ─► actors × η, each simulated small ─► rows ─► choice ─► in full size ─ not busy? ─► the next η

A smaller system waits less for the longest answer of a batch, because a batch has fewer: what is recommended is looked
at in full size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from async_rl.plan.outcome import Outcome
from async_rl.plan.scenario import MAX_ACTORS, Scenario
from async_rl.plan.simulator import Simulator

BOUNDS = (0, 1, 2, 3, 4, 6, 8)
"""η that are tried, beside that of the configuration."""
SHARES = (0.5, 0.75, 1.0, 1.1, 1.25, 1.5, 2.0)
"""Numbers of actors that are tried, over that at which both sides are equally fast."""
BUSY = 0.97
"""A side that works so much of the time is busy."""
SLOW_STEPS = 2
_SMALL, _LARGE = 2_000, 150_000
"""Most sequences per step of a first look, and most groups of a simulation in full size."""
_FEWEST = 50
"""Actors, and groups of a step, of which a smaller system keeps as many."""


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate and what it gives."""

    scenario: Scenario
    outcome: Outcome
    thinned: int = 1
    """The simulated system was so many times smaller; tokens a second are those of the whole one."""

    @property
    def bound(self) -> int:
        """η."""
        return self.scenario.rules.max_staleness

    @property
    def tokens_per_s(self) -> float:
        """Trained, by the whole system."""
        return self.outcome.tokens_per_s * self.scenario.actors / self.scenario.thinned(self.thinned).actors

    @property
    def of_ideal(self) -> float:
        """Share of what both sides could do together: that of the time in which the slower one works."""
        return max(self.outcome.learner, self.outcome.actors)


@dataclass(frozen=True, slots=True)
class Plan:
    """All rows, and the one to take."""

    rows: tuple[Row, ...]
    choice: Row


def predict(scenario: Scenario, thinned: int = 1) -> Row:
    """Simulate until the steady state has been seen for some steps.

    Raises:
        ConfigError: such a run would not go on.
    """
    small = scenario.thinned(thinned) if thinned > 1 else scenario
    steps = min(60, max(8, 20_000 // (small.rules.groups_per_step * small.rules.group_size)))
    warmup = scenario.rules.max_staleness + 4
    return Row(scenario, Simulator(small, SLOW_STEPS).run(warmup, steps), thinned)


def search(base: Scenario, counts: Sequence[int], bounds: Sequence[int]) -> Plan:
    """Try all ``counts`` of actors; for each ``bounds`` upwards until more buys nothing.

    Args:
        base: the system.
        counts: of actors, rising.
        bounds: η, rising.
    """
    rows: list[Row] = []
    for actors in counts:
        for bound in bounds:
            candidate = base.with_actors(actors).with_bound(bound)
            rows.append(predict(candidate, _first_look(candidate)))
            if rows[-1].of_ideal >= BUSY and bound >= base.rules.max_staleness:
                break
    choice = choose(rows)
    if choice.thinned > 1:
        choice = _in_full(choice, bounds, rows)
    return Plan(tuple(rows), choice)


def _in_full(choice: Row, bounds: Sequence[int], rows: list[Row]) -> Row:
    """The choice once more in full size, and the next η where that shows it to be too small; ``rows`` get both."""
    found: list[Row] = []
    for bound in [b for b in bounds if b >= choice.bound][:2]:
        candidate = choice.scenario.with_bound(bound)
        found.append(predict(candidate, _full_size(candidate)))
        if found[-1].of_ideal >= min(BUSY, choice.of_ideal - 0.02):
            break
    places = [i for i, row in enumerate(rows) if row.scenario.actors == choice.scenario.actors]
    kept = [rows[i] for i in places if rows[i].bound not in {row.bound for row in found}]
    rows[places[0] : places[-1] + 1] = sorted([*kept, *found], key=lambda row: row.bound)
    return choose(found)


def choose(rows: Sequence[Row]) -> Row:
    """The fewest actors that keep the learner busy, with the smallest η that does; else what trains most tokens.

    Both within 1 % of the best: a row that is hardly better is not worth more actors or older data.
    """
    busy = [row for row in rows if row.outcome.learner >= BUSY]
    fewest = [row for row in busy if row.scenario.actors == min(r.scenario.actors for r in busy)] if busy else rows
    best = max(row.tokens_per_s for row in fewest)
    good = [row for row in fewest if row.tokens_per_s >= 0.99 * best]
    return min(good, key=lambda row: (row.scenario.actors, row.bound))


def actor_counts(base: Scenario) -> list[int]:
    """Numbers of actors around that at which both sides are equally fast, rising."""
    return sorted({min(MAX_ACTORS, max(1, math.ceil(share * base.balanced_actors))) for share in SHARES})


def bounds_of(base: Scenario) -> list[int]:
    """η to try, rising."""
    return sorted({*BOUNDS, base.rules.max_staleness})


def _first_look(scenario: Scenario) -> int:
    rules = scenario.rules
    sequences = rules.groups_per_step * rules.group_size
    return max(1, min(sequences // _SMALL, scenario.actors // _FEWEST, rules.groups_per_step // _FEWEST))


def _full_size(scenario: Scenario) -> int:
    """1 unless it would take more than half a minute or so."""
    rules = scenario.rules
    groups = (
        rules.groups_per_step * (2 * rules.max_staleness + 12) * max(1.0, rules.group_size / 8)
    )  # with what is open
    return max(1, math.ceil(groups / _LARGE))
