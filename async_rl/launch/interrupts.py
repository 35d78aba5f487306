"""Ctrl-C and SIGTERM as something to look at instead of an exception in the middle of anything."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Counts SIGINT and SIGTERM while the block runs; the handlers before come back after it. Main thread only.

    The first asks the run to wind down, the second ends it at once.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """What a shell expects: 128 plus the first signal; 0 without one."""
        return 128 + self.first if self.first else 0

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(number)
