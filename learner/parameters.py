"""What updates, publication and comparison need of "what is trained", whole on each rank or in shards.

    FlatParameters     one vector on every rank, one all_reduce an update                     learner.strategy = "flat"
    ShardedParameters  FSDP2: a shard of each tensor; layers are gathered when they are run   learner.strategy = "fsdp"

Both have the same names, shapes and offsets, so a version is the same bytes and a checkpoint the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch

from learner.slots import Slot

T = TypeVar("T")

Piece = tuple[int, torch.Tensor]
"""First element in the flat vector, and what lies from there on, of any shape."""


class Parameters(Protocol):
    """The trainable parameters of some modules with their gradients."""

    layout: tuple[Slot, ...]
    roles: tuple[str, ...]
    tail: torch.Tensor
    """The scalars of an update ``[num_scalars]``, summed over the ranks with the gradient."""

    @property
    def in_step(self) -> bool:
        """Whether all ranks must make the same passes: the same numbers of :meth:`run` and :meth:`backward`."""

    @property
    def reduced(self) -> torch.Tensor:
        """What the all_reduce of an update sums."""

    @property
    def replicated(self) -> tuple[torch.Tensor, ...]:
        """What every rank holds a copy of, and rank 0 has to give to the others at the start."""

    def slots(self, role: str) -> tuple[Slot, ...]:
        """Where the tensors of one module lie, under the names that they have in it."""

    def refresh(self) -> None:
        """Make the modules compute with the master parameters as they are now."""

    def zero_grad(self) -> None:
        """Clear gradient and tail."""

    def run(self, work: Callable[[], T]) -> T:
        """Run forward passes whose results need no gradient; parameters of any module may be read in ``work``."""

    def backward(self, work: Callable[[], tuple[torch.Tensor, T]]) -> T:
        """Run ``work``, which returns a loss ``[]`` and something else; add the loss's gradient, return the rest."""

    def finish_gradient(self) -> None:
        """After the last :meth:`backward` of an update, before :attr:`reduced` is summed."""

    def checksum(self) -> int:
        """64 bits over all parameters, the same on ranks that compute with the same ones."""

    def checksums(self) -> list[int]:
        """The same by tensor, in the order of ``layout``."""

    def pieces(self) -> Iterator[Piece]:
        """The published part of the flat vector, in ascending order; what lies in gaps between pieces is zero.

        Each piece is valid until the next one. Other ranks call :meth:`assist` meanwhile.
        """

    def assist(self) -> None:
        """What other ranks do while rank 0 reads :meth:`pieces`."""
