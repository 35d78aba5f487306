"""Returns and lengths of the episodes that ended, over the last hundred, as users of rsl_rl know them.

fragments ─► episode_sums [3] ─► sum over ranks ─► EpisodeStats.take ─► metrics
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from async_rl.data import Group
from async_rl.metrics import Metrics

WINDOW = 100
"""Episodes that a mean is taken over, at least; those of one step stay together."""


def episode_sums(groups: Sequence[Group]) -> torch.Tensor:
    """Number of episodes that ended in these fragments, sum of their returns, sum of their lengths: float64 [3]."""
    sums = np.zeros(3)
    for group in groups:
        returns, lengths = group.arrays["episode_returns"], group.arrays["episode_lengths"]
        sums += len(returns), returns.sum(dtype=np.float64), lengths.sum()
    return torch.from_numpy(sums)


class EpisodeStats:
    """The episodes of the latest steps, at least :data:`WINDOW` of them where there were so many."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float]] = deque()

    def take(self, sums: torch.Tensor) -> Metrics:
        """Add a step's :func:`episode_sums`, of all ranks, and tell the means of the latest episodes.

        Returns:
            ``episode/return``, ``episode/length`` (None before the first one ended) and ``episode/count`` of this step.
        """
        count, returns, lengths = sums.tolist()
        if count:
            self._steps.append((count, returns, lengths))
        while sum(step[0] for step in self._steps) - (self._steps[0][0] if self._steps else 0) >= WINDOW:
            self._steps.popleft()
        episodes = sum(step[0] for step in self._steps)
        return {
            "episode/return": sum(step[1] for step in self._steps) / episodes if episodes else None,
            "episode/length": sum(step[2] for step in self._steps) / episodes if episodes else None,
            "episode/count": count,
        }
