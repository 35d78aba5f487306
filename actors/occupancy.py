"""How long the slots of an engine were in use: what an actor could have generated beside what it did.

number of samples ─► note, at each turn of the loop ─► slot-seconds, read at any time, from any thread
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Occupancy:
    """Adds up the seconds of slots in which a sample was decoded; between two notes the number stays.

    A sample that ends wakes the loop, so the error is the time which that takes. The pause of a swap counts as use; it
    is reported by itself.

    Args:
        slots: of the engine.
        clock: monotonic seconds.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots, self._clock = slots, clock
        self._line = (0.0, 0)
        """Seconds of slots at time 0 of the clock, and slots in use: one object, so that another thread reads both."""

    def note(self, running: int) -> None:
        """So many samples run, or wait for a slot, from now on."""
        at_zero, before = self._line
        used = min(running, self._slots)
        if used != before:
            self._line = (at_zero + (before - used) * self._clock(), used)

    def read(self) -> dict[str, float]:
        """``slots``; ``slot_s``: seconds of slots in use so far; ``clock_s``: now."""
        now = self._clock()
        at_zero, used = self._line
        return {"slots": self._slots, "slot_s": round(at_zero + used * now, 4), "clock_s": round(now, 4)}
