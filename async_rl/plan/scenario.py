"""What is simulated: the rules of a run, the speeds of both sides, how long responses are.

configuration ─► rules, slots ─┐
stated or measured speeds ─────┴─► Scenario ─► simulator.py        thinned: the same, smaller, for a quick look
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from async_rl.buffer.records import Rules
from async_rl.config import AnyConfig, Config
from async_rl.errors import ConfigError
from async_rl.lengths import Lengths

MAX_ACTORS = 10_000
MAX_RANKS = 1_000
ENDLESS = 1 << 40
"""Steps of a simulated run: its end, at which actors run out of work, is not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """How fast both sides are.

    Raises:
        ConfigError: a number is out of range; names its option.
    """

    slot_tokens_per_s: float
    """Tokens that one slot decodes in a second (control: environment steps of an actor)."""
    step_s: float
    """Seconds from a step's batch to its end, with equal shards."""
    publish_s: float = 0.0
    """Seconds of the learner after a step until the new version is announced."""
    weights_s: float = 0.0
    """From there until it is live on the actors, which generate meanwhile."""
    pause_s: float = 0.0
    """For which the swap itself stops an actor."""
    filtered: float = 0.0
    """Share of the groups that are replaced by fresh ones."""

    def __post_init__(self) -> None:
        for name in ("slot_tokens_per_s", "step_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: it must be above 0")
        for name in ("publish_s", "weights_s", "pause_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: it must be 0 or more")
        if not 0 <= self.filtered <= 0.99:
            raise ConfigError(f"--filtered {self.filtered}: a share between 0 and 0.99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One system to be simulated.

    Raises:
        ConfigError: a number is out of range; names it.
    """

    rules: Rules
    """As of the run; the simulator changes what does not matter in virtual time."""
    actors: int
    slots: int
    """Sequences that an actor decodes at the same time."""
    lengths: Lengths
    speeds: Speeds
    ranks: int = 1
    weight_updates: Literal["in_flight", "drained"] = "in_flight"
    """``drained``: an actor ends what it has begun before it takes new weights, and begins nothing before."""
    imbalance: bool = False
    """Whether a step takes as long as the rank with the most tokens."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.actors <= MAX_ACTORS:
            raise ConfigError(f"--actors {self.actors}: between 1 and {MAX_ACTORS:,}")
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ConfigError(f"--ranks {self.ranks}: between 1 and {MAX_RANKS:,}")
        if self.rules.groups_per_step < self.ranks:
            raise ConfigError(
                f"buffer.groups_per_step = {self.rules.groups_per_step} is too small for {self.ranks} ranks: each "
                "needs a group; raise it, or lower --ranks"
            )

    @property
    def asks_ahead(self) -> bool:
        """Whether the learner asks for a step's batch during the step before, as :mod:`learner.trainer` does."""
        return self.rules.max_staleness > 0 and self.rules.max_uses == 1

    @property
    def learner_s(self) -> float:
        """Seconds of a step in which the learner works."""
        return self.speeds.step_s + self.speeds.publish_s

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a step trains."""
        return self.rules.groups_per_step * self.rules.group_size * self.lengths.mean()

    @property
    def learner_tokens_per_s(self) -> float:
        """What a learner that never waits trains."""
        return self.tokens_per_step / self.learner_s

    @property
    def actor_tokens_per_s(self) -> float:
        """What an actor whose slots are always full adds to what is trained."""
        return self.slots * self.speeds.slot_tokens_per_s * (1 - self.speeds.filtered)

    @property
    def balanced_actors(self) -> float:
        """Actors at which both sides could work all the time: learner's tokens a second / one actor's."""
        return self.learner_tokens_per_s / self.actor_tokens_per_s

    def with_actors(self, actors: int) -> Scenario:
        """The same with another number of actors."""
        return replace(self, actors=actors)

    def with_bound(self, max_staleness: int) -> Scenario:
        """The same with another η."""
        return replace(self, rules=replace(self.rules, max_staleness=max_staleness))

    def thinned(self, factor: int) -> Scenario:
        """A system ``factor`` times smaller on both sides; steps take as long, so every share stays about the same."""
        actors = max(1, round(self.actors / factor))
        groups = max(1, round(self.rules.groups_per_step * actors / self.actors))
        ranks = max(1, min(groups, round(self.ranks * actors / self.actors)))
        return replace(self, actors=actors, ranks=ranks, rules=replace(self.rules, groups_per_step=groups))


def scenario(
    config: AnyConfig,
    *,
    speeds: Speeds,
    lengths: Lengths,
    actors: int,
    ranks: int,
    imbalance: bool = False,
) -> Scenario:
    """The scenario of a configuration; a fragment of a control run is one sequence of T · N steps."""
    rules = Rules.from_config(config)
    system: dict[str, Any] = {
        "actors": actors,
        "ranks": ranks,
        "lengths": lengths,
        "speeds": speeds,
        "imbalance": imbalance,
    }
    if isinstance(config, Config):
        slots, updates = config.actors.slots, config.actors.weight_updates
        return Scenario(rules=rules, slots=slots, weight_updates=updates, seed=config.seed, **system)
    return Scenario(rules=replace(rules, group_size=1), slots=1, seed=config.seed, **system)
