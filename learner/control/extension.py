"""What RND and AMP add to PPO: a reward that the learner computes, a network of their own, a loss, running statistics.

rewards [T, N] ─► Extension.reward ─► rewards [T, N] ─► advantages        Extension.loss is added in each update
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from async_rl.metrics import Metrics
from learner.control.method import Memory, Sums, Totals
from learner.control.rollout import Rollout


class Extension(Protocol):
    """One addition to PPO; its modules lie in the flat vector like all others."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """By role."""

    @property
    def memories(self) -> Mapping[str, Memory]:
        """By name: what it remembers from step to step beside ``modules``; a checkpoint has that of rank 0."""

    @property
    def sums(self) -> Mapping[str, int]:
        """Names and lengths of what :meth:`loss` returns."""

    def rates(self, step: int) -> Mapping[str, float]:
        """Learning rate of each role."""

    def reward(self, rollout: Rollout, rewards: torch.Tensor, step: int) -> torch.Tensor:
        """Rewards [T, N] with this one's share, at the parameters of the step's start; remembers what it measures.

        May use collectives: every rank calls it once a step, in the same order.
        """

    def loss(self, rollout: Rollout, index: torch.Tensor, count: int) -> tuple[torch.Tensor, Sums]:
        """The share of this rank in the loss of one update.

        Args:
            rollout: this rank's data.
            index: int64 [m], its samples in this update: positions in the flattened [T·N].
            count: samples over all ranks, the denominator.
        """

    def finish(self, rollout: Rollout, step: int) -> None:
        """After the last update: running statistics, reduced over the ranks."""

    def metrics(self, totals: Totals, num_updates: int) -> Metrics:
        """Its numbers of the step."""
