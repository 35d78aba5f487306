"""What a domain (tokens, control) brings to the learner's loop; trainer, leader and checkpoints know nothing else.

shard (header, frames) ─► Domain.train ─► Trained ─► metrics          flat ─► published, compared, checkpointed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from async_rl.metrics import Metrics
from async_rl.wire import Frame, Header
from learner.parameters import Parameters
from learner.slots import Slot


@dataclass(frozen=True, slots=True)
class Trained:
    """One finished step on this rank; its metrics are the same on every rank."""

    metrics: Metrics
    amount: float
    """Tokens, or steps of environments, that were trained over all ranks, each counted once."""


class Domain(Protocol):
    """The models of a rank with their parameters and optimiser."""

    @property
    def flat(self) -> Parameters:
        """What is trained, as one flat vector or as shards of it."""

    @property
    def published(self) -> tuple[Slot, ...]:
        """What actors get: slots from the beginning of the flat vector on."""

    def train(self, header: Header, frames: Sequence[Frame], step: int) -> Trained:
        """Make all updates of ``step``, which trains version ``step``.

        Args:
            header: of this rank's ``shard`` message.
            frames: its arrays.
            step: from 0.

        Raises:
            AsyncRLError: actor and learner disagree about the same weights, or no update is finite.
        """

    def numbers(self) -> dict[str, float]:
        """What controllers have moved (``lr``, ...), for the checkpoint; whole numbers as floats."""

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        """Continue from :meth:`numbers`; what the configuration holds constant stays as configured."""

    def save(self, folder: Path) -> None:
        """Write the models and the optimiser's state into a checkpoint folder; on every rank, where they are spread."""

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote.

        Raises:
            ConfigError: it is missing, damaged, or of other models.
        """

    def offload(self) -> None:
        """Give the device's memory back until :meth:`restore` (colocated)."""

    def restore(self) -> None:
        """Take it again."""
