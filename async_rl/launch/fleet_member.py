"""One command of a run on a cluster by its name, whichever life of it runs. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from async_rl.launch.places import Life
from async_rl.launch.policy import Lives


@dataclass(slots=True)
class FleetMember:
    """A learner host, an actor or a scorer."""

    name: str
    role: str
    """``learner``, ``actor``, ``reward`` or ``reference``."""
    index: int
    life: Life | None = None
    lives: Lives = field(default_factory=Lives)
    asked_at: float = 0.0
    """When its place was asked for."""
    address: str = ""
    """That its present life serves; its own for the first learner host, also between two lives."""
    leaves_at: float | None = None
    """When it was asked to leave; ``None``: it was not."""

    @property
    def is_first(self) -> bool:
        """Whether it is the learner host with the buffer server."""
        return self.role == "learner" and self.index == 0

    @property
    def is_placed(self) -> bool:
        """Whether it runs somewhere."""
        return self.life is not None and self.life.is_placed
