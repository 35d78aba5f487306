"""Messages on their way from a client's I/O thread to its main thread.

I/O thread ── put / fail ──► Inbox ── take ──► main thread        fileno(): readable while take() would not be empty
"""

from __future__ import annotations

import math
import os
import select
import threading

from async_rl.wire import Frame, Header

Message = tuple[Header, list[Frame]]


class Inbox:
    """Messages for the main thread, with a descriptor that is readable while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: list[Message] = []
        self._error: Exception | None = None
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def put(self, message: Message) -> None:
        """Add a message."""
        with self._lock:
            self._messages.append(message)
            os.eventfd_write(self._descriptor, 1)

    def fail(self, error: Exception) -> None:
        """Raise ``error`` from now on, once the messages are taken. The first one stays."""
        with self._lock:
            self._error = self._error or error
            os.eventfd_write(self._descriptor, 1)

    def take(self, timeout_s: float) -> list[Message]:
        """All messages; waits for the first at most ``timeout_s``."""
        self._poll.poll(math.ceil(timeout_s * 1000))
        with self._lock:
            messages, self._messages = self._messages, []
            if not messages and self._error is not None:
                raise self._error
            if self._error is None and messages:
                os.eventfd_read(self._descriptor)
            return messages

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def close(self) -> None:
        """Free the descriptor."""
        os.close(self._descriptor)
