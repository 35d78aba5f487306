"""Messages on their way from a client's main thread to its I/O thread, see :mod:`async_rl.inbox` for the others.

main thread ── put ──► Outbox ── take ──► I/O thread         fileno(): readable after put or wake, until take
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterable, Sequence
from typing import Any

from async_rl.data import Annotation, Group

Payload = Sequence[Group | Annotation]
Command = tuple[str, dict[str, Any], Payload]
"""Type, fields and payload of a message."""
MOST_TOGETHER = 1 << 16
"""Bytes of the arrays of groups that go as one message."""


class Outbox:
    """A queue, and a descriptor that wakes who waits for it."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, command: Command) -> None:
        """Add a message."""
        self._commands.put(command)
        self.wake()

    def take(self) -> list[Command]:
        """All messages; small groups that were submitted one after the other are one, which costs the server less."""
        commands: list[Command] = []
        while True:
            try:
                commands.append(self._commands.get_nowait())
            except queue.Empty:
                return together(commands)

    def wake(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self._wakeup, 1)

    def clear(self) -> None:
        """Let the descriptor be readable only after the next message."""
        try:
            os.eventfd_read(self._wakeup)
        except BlockingIOError:
            return

    def fileno(self) -> int:
        """The descriptor."""
        return self._wakeup

    def close(self) -> None:
        """Free the descriptor."""
        os.close(self._wakeup)


def together(commands: Iterable[Command]) -> list[Command]:
    """The same messages, in order; neighbours that submit small groups with the same fields are joined."""
    joined: list[Command] = []
    size = 0
    for command in commands:
        kind, fields, payload = command
        nbytes = sum(item.nbytes for item in payload if isinstance(item, Group)) if kind == "submit" else 0
        if nbytes and size and size + nbytes <= MOST_TOGETHER and joined[-1][:2] == (kind, fields):
            joined[-1] = (kind, fields, [*joined[-1][2], *payload])
            size += nbytes
        else:
            joined.append(command)
            size = nbytes
    return joined
