"""What the launcher needs from outside (a line to the server, a display) and what it gives back (an outcome)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Status = Literal["completed", "stopped", "failed"]


class Monitor(AbstractContextManager["Monitor"], Protocol):
    """The launcher's line to the server; :class:`async_rl.client.Client` is the real one."""

    def connect(self, timeout_s: float) -> Mapping[str, Any]:
        """Say hello; the welcome."""

    def send(self, kind: str, /, **fields: Any) -> None:
        """Send a message."""

    def receive(self, timeout_s: float) -> Sequence[tuple[Mapping[str, Any], Any]]:
        """Messages that came within the time."""


class Display(Protocol):
    """Where the run shows itself."""

    def update(self, status: Mapping[str, Any]) -> None:
        """Take a ``status`` message."""

    def note(self, text: str) -> None:
        """Say one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the run ended."""

    status: Status
    reason: str
    """One sentence; with the end of a log when a process died."""
    exit_code: int
    wall_s: float
    cpu_s: Mapping[str, float]
    """User and system seconds per process name, over all its lives."""
    restarts: Mapping[str, int]
    """Restarts per process name, where there were any."""
