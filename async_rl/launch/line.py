"""The launcher's line to a server that may die and come back.

open ─► Monitor ─► status, stop ──► the server is away for longer than a client waits: None ─► open again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from async_rl.errors import DeadlineError
from async_rl.launch.interfaces import Monitor

REOPEN_S = 5.0
"""A server that is there answers within this time."""


class Line:
    """One monitor at a time. Use as a context manager.

    Args:
        open_monitor: makes a monitor for an address.
        address: of the server, the same in all its lives.
    """

    def __init__(self, open_monitor: Callable[[str], Monitor], address: str) -> None:
        self._open, self._address = open_monitor, address
        self._monitor: Monitor | None = None

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether there is a monitor."""
        return self._monitor is not None

    def connect(self, timeout_s: float) -> None:
        """Open it.

        Raises:
            DeadlineError: nothing answered in time.
            HandshakeError: the server refuses us.
        """
        monitor = self._open(self._address)
        monitor.__enter__()
        try:
            monitor.connect(timeout_s)
        except BaseException:
            monitor.__exit__(None, None, None)
            raise
        self._monitor = monitor

    def send(self, kind: str, /, **fields: Any) -> None:
        """Send a message; a server that is away for long is told nothing, it will find out by itself."""
        if self._monitor is not None:
            self._monitor.send(kind, **fields)

    def receive(self, timeout_s: float) -> list[Mapping[str, Any]]:
        """Headers that came within the time.

        Raises:
            DeadlineError: the server has been away for longer than a client waits; the line is closed.
            HandshakeError: the server has let us go.
        """
        assert self._monitor is not None
        try:
            return [header for header, _ in self._monitor.receive(timeout_s)]
        except DeadlineError:
            self.close()
            raise

    def close(self) -> None:
        """Say goodbye; closing again does nothing."""
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.__exit__(None, None, None)
