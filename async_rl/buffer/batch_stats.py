"""A batch in numbers: the age of its tokens (or steps), rewards, lengths; for metrics, status and books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_rl.data import Array, Group, is_correct


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStats:
    """One delivered batch."""

    ages: dict[int, int]
    """Sampled tokens, or steps in which an action counted, per age in learner versions."""
    reward: float
    """Mean over sequences; over steps in fragments of environments."""
    accuracy: float | None = None
    """Share of sequences that are correct, see :func:`async_rl.data.is_correct`; None in a control run."""
    length: float | None = None
    """Sampled tokens per sequence; None in a control run."""

    def to_plain(self) -> dict[str, Any]:
        """For the ``shard`` message; without what is None."""
        named = {"reward": self.reward, "accuracy": self.accuracy, "length": self.length}
        return {k: v for k, v in named.items() if v is not None} | {"age": describe_ages(self.ages)}


def batch_stats(groups: Sequence[Group], step: int) -> BatchStats:
    """Measure a batch that step ``step`` trains; a token's age is ``step`` minus the version that sampled it."""
    if any("tokens" not in g.arrays for g in groups):
        return _control_stats(groups, step)
    ages = batch_ages(groups, step)
    rewards = np.concatenate([g.rewards for g in groups])
    return BatchStats(
        ages=ages,
        reward=float(rewards.mean(dtype=np.float64)),
        accuracy=float(is_correct(rewards).mean()),
        length=sum(ages.values()) / len(rewards),
    )


def batch_ages(groups: Sequence[Group], step: int) -> dict[int, int]:
    """Sampled tokens, or steps in which an action counted, per age at step ``step``."""
    ages: Counter[int] = Counter()
    for group in groups:
        oldest = group.oldest_version
        if oldest == group.newest_version:  # as mostly: then nothing need be counted
            ages[step - oldest] += group.num_sampled
        else:
            versions = _versions(group)
            counts = np.bincount(versions[versions >= 0] - oldest)
            ages.update({step - oldest - later: int(counts[later]) for later in np.flatnonzero(counts).tolist()})
    return dict(sorted(ages.items()))


def describe_ages(ages: Mapping[int, int]) -> dict[str, Any]:
    """Token-weighted ``mean``, ``max`` and ``histogram`` (JSON has text keys only)."""
    total = sum(ages.values())
    return {
        "mean": sum(a * n for a, n in ages.items()) / total if total else 0.0,
        "max": max(ages, default=0),
        "histogram": {str(a): n for a, n in sorted(ages.items())},
    }


def _control_stats(groups: Sequence[Group], step: int) -> BatchStats:
    """Fragments have a reward for each step; episodes have one each."""
    ages = batch_ages(groups, step)
    if all("step_rewards" in g.arrays for g in groups):
        total = sum(_sum_acted(g.arrays["step_rewards"], g.arrays["versions"]) for g in groups)
        return BatchStats(ages=ages, reward=total / max(1, sum(ages.values())))
    return BatchStats(ages=ages, reward=float(np.concatenate([g.rewards for g in groups]).mean(dtype=np.float64)))


def _versions(group: Group) -> Array:
    """A version for each sampled token or acted step; in episodes each part of an action has one, the oldest counts."""
    versions = group.arrays["versions"]
    is_episodes = "tokens" not in group.arrays and "step_rewards" not in group.arrays
    return versions.min(axis=1) if is_episodes else versions


def _sum_acted(rewards: Array, versions: Array) -> float:
    return float(rewards.sum(where=versions >= 0, dtype=np.float64))
