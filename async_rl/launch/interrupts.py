"""Ctrl-C, SIGTERM and a lost terminal as something to look at instead of an exception in the middle of anything."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts these signals while the block runs; the handlers before come back after it. Main thread only.

    The first asks the run to wind down, the second ends it at once. SIGHUP stays ignored where it was (``nohup``).
    """

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __enter__(self) -> Interrupts:
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __del__(self) -> None:
        os.close(self._wakeup)

    @property
    def exit_code(self) -> int:
        """What a shell expects: 128 plus the first signal; 0 without one."""
        return 128 + self.first if self.first else 0

    def wait(self, timeout_s: float, others: Sequence[int] = ()) -> None:
        """Return at a signal that came since the last call, when a descriptor is readable, or when the time is up."""
        ready, _, _ = select.select([self._wakeup, *others], [], [], max(0.0, timeout_s))
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(number)
        os.eventfd_write(self._wakeup, 1)
