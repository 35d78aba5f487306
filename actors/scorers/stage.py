"""What a scorer process does with the groups that it leases: one of two stages behind one interface.

lease ─► Stage.submit ─► step ─► annotated groups, failures          rewards/stage.py: reward, reference.py: reference
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from async_rl.data import Annotation, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A group that cannot be annotated: no other scorer could, either."""

    group: Group
    reason: str
    """Short slug that the server counts."""
    detail: str
    """For people."""


class Stage(Protocol):
    """Annotates groups; belongs to one thread."""

    @property
    def wanted(self) -> int:
        """Groups to hold at the same time, so that there is always a next one."""

    @property
    def busy(self) -> bool:
        """Whether :meth:`step` has work of its own to do; else it waits for a descriptor or for nothing."""

    def submit(self, group: Group) -> None:
        """Take a leased group."""

    def step(self) -> list[Annotation | Failure]:
        """Do what can be done now; what it adds to the groups that are done, and which failed."""

    def filenos(self) -> list[int]:
        """Descriptors that become readable when :meth:`step` has something to do; they may change after each."""

    @property
    def next_deadline(self) -> float | None:
        """``time.monotonic()`` at which :meth:`step` must be called at the latest."""

    def close(self) -> None:
        """Free what it holds."""
