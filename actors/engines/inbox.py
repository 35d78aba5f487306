"""Completions on their way from a thread of the engine to the one that steps it, behind a descriptor.

engine thread ── put / fail ──► Inbox ── take ──► step()        fileno(): readable while take() would not be empty
"""

from __future__ import annotations

import os
import select
import threading
from typing import Generic, TypeVar

from async_rl.errors import StartAgainError

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue with one consumer; once it has failed, every :meth:`take` says why."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: list[T] = []
        self._failure: str | None = None
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def fileno(self) -> int:
        """Readable while :meth:`take` would return something or raise."""
        return self._event

    @property
    def failure(self) -> str | None:
        """The first failure, or None."""
        return self._failure

    def put(self, items: list[T]) -> None:
        """Add items and wake the consumer; free when there is nothing to add."""
        with self._lock:
            if items and not self._closed:
                self._items.extend(items)
                os.eventfd_write(self._event, 1)

    def fail(self, reason: str) -> None:
        """Make every :meth:`take` from now on raise; only the first reason is kept."""
        with self._lock:
            if self._failure is None and not self._closed:
                self._failure = reason
                os.eventfd_write(self._event, 1)

    def take(self, timeout_s: float) -> list[T]:
        """Everything that is there, after waiting at most ``timeout_s`` for the first.

        Raises:
            StartAgainError: :meth:`fail` was called: this engine is of no use any more, a new one may be.
        """
        select.select([self._event], [], [], max(0.0, timeout_s))
        with self._lock:
            if self._failure is not None:
                raise StartAgainError(self._failure)
            items, self._items = self._items, []
            if items:
                os.eventfd_read(self._event)
        return items

    def close(self) -> None:
        """Close the descriptor; later :meth:`put` and :meth:`fail` are ignored."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._event)
