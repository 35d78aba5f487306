"""A batch in numbers: the age of its tokens, rewards, lengths; for metrics, status and books."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_rl.data import Group, is_correct


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStats:
    """One delivered batch."""

    ages: dict[int, int]
    """Sampled tokens per age, in learner versions."""
    reward: float
    """Mean over sequences."""
    accuracy: float
    """Share of sequences that are correct, see :func:`async_rl.data.is_correct`."""
    length: float
    """Sampled tokens per sequence."""

    def to_plain(self) -> dict[str, Any]:
        """For the ``shard`` message."""
        return {
            "reward": self.reward,
            "accuracy": self.accuracy,
            "length": self.length,
            "age": describe_ages(self.ages),
        }


def batch_stats(groups: Sequence[Group], step: int) -> BatchStats:
    """Measure a batch that step ``step`` trains; a token's age is ``step`` minus the version that sampled it."""
    versions = np.concatenate([g.arrays["versions"] for g in groups])
    ages, tokens = np.unique(step - versions[versions >= 0], return_counts=True)
    rewards = np.concatenate([g.rewards for g in groups])
    return BatchStats(
        ages=dict(zip(ages.tolist(), tokens.tolist(), strict=True)),
        reward=float(rewards.mean(dtype=np.float64)),
        accuracy=float(is_correct(rewards).mean()),
        length=float(tokens.sum() / len(rewards)),
    )


def describe_ages(ages: Mapping[int, int]) -> dict[str, Any]:
    """Token-weighted ``mean``, ``max`` and ``histogram`` (JSON has text keys only)."""
    total = sum(ages.values())
    return {
        "mean": sum(a * n for a, n in ages.items()) / total if total else 0.0,
        "max": max(ages, default=0),
        "histogram": {str(a): n for a, n in sorted(ages.items())},
    }
