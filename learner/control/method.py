"""What an algorithm brings to the control learner: its networks, a batch, the loss of one update, what follows a step.

    groups ─► prepare ─► Batch(updates) ─► loss(batch, part) for each ─► finish ─► metrics

:mod:`learner.control.domain` does the rest for all of them: gradients, collective, clipping, rates, skipped updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from async_rl.data import Group
from async_rl.metrics import Metrics

Sums = Mapping[str, torch.Tensor | float]
"""Numbers of this rank's part, added up over all ranks in the tail of the gradient."""
Totals = Mapping[str, torch.Tensor]
"""The same after the reduction, float64 on the CPU, equal on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The data of this rank of one step, prepared at the parameters of the step's start."""

    data: Any
    """What the method made of it; the domain does not look."""
    updates: Sequence[Any]
    """What :meth:`Method.loss` is called with, one entry per update; every rank has equally many."""
    amount: float
    """Environment steps that are trained, over all ranks."""
    facts: Metrics
    """What was measured on the way, the same on all ranks (returns, differences of log-probabilities, ...)."""


class Memory(Protocol):
    """Data that a method gathers over the steps; it is a rank's own, and no gradient goes into it."""

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint needs."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from :meth:`state`, on any rank.

        Raises:
            KeyError, ValueError: it is of something else.
        """


class Method(Protocol):
    """One algorithm. Everything with parameters or running statistics is in ``modules``."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """By role, ``policy`` first, in the order of the flat vector, which takes their parameters and state."""

    @property
    def published(self) -> tuple[str, ...]:
        """The roles that actors need: the first of ``modules``."""

    @property
    def memories(self) -> Mapping[str, Memory]:
        """By name: what it remembers from step to step beside ``modules``; a checkpoint has that of rank 0."""

    @property
    def sums(self) -> Mapping[str, int]:
        """Names and lengths of what :meth:`loss` returns; the adaptive rate follows ``kl`` / ``samples`` among them."""

    def rates(self, lr: float, step: int) -> Mapping[str, float]:
        """Learning rate of each role, given that of the schedule."""

    def clipped(self) -> tuple[str, ...]:
        """Roles whose gradient is clipped, each by its own norm."""

    def prepare(self, groups: Sequence[Group], step: int) -> Batch:
        """Values, advantages, targets: whatever an update needs beside the parameters; may use collectives.

        Raises:
            AsyncRLError: actor and learner disagree about the log-probabilities of the same weights.
        """

    def loss(self, batch: Batch, part: Any) -> tuple[torch.Tensor, Sums]:
        """The share of this rank in the loss of one update: sums over its samples divided by *global* counts."""

    def finish(self, batch: Batch, step: int) -> None:
        """After the last update: running statistics, reduced over the ranks."""

    def metrics(self, totals: Totals, num_updates: int) -> Metrics:
        """The step in numbers, of the sums over its updates."""
