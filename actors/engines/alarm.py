"""A descriptor that becomes readable at a given time, so that a loop can wait for it beside its sockets (Linux)."""

from __future__ import annotations

import ctypes
import os

_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1
_NS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """A timerfd on the clock of :func:`time.monotonic`."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        """The descriptor; readable from the set time until :meth:`set` is called again."""
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def set(self, when_s: float | None) -> None:
        """Go off at monotonic ``when_s`` (at once if it has passed); None: not at all."""
        at = 0 if when_s is None else max(1, round(when_s * _NS))  # 0 would mean never
        spec = _Itimerspec(_Timespec(0, 0), _Timespec(at // _NS, at % _NS))
        if self._libc.timerfd_settime(self.fd, _ABSOLUTE, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """Give the descriptor back; may be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
