"""One state timer per process: at each moment a process is in exactly one state, so fractions sum to 1.

timer.enter("generating") ... timer.enter("waiting_ticket") ...      timer.drain() ─► heartbeat ─► timeline.jsonl
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

State = Literal[
    "starting",
    "generating",
    "scoring",
    "paused",
    "waiting_ticket",
    "waiting_weights",
    "waiting_data",
    "training",
    "reducing",
    "publishing",
    "checkpointing",
    "evaluating",
    "idle",
]
STATES: tuple[State, ...] = get_args(State)
WORK: frozenset[State] = frozenset(
    {"generating", "scoring", "training", "reducing", "publishing", "checkpointing", "evaluating"}
)
"""States in which a process does its own work; utilisation is their share of wall-clock, ``starting`` excluded.

``paused`` is a swap of weights, for which generation stands still.
"""

_MAX_SPANS = 4096


class StateTimer:
    """Adds up the seconds in each state and keeps the spans until they are drained. Safe to drain from another thread.

    Args:
        clock: monotonic seconds; passed in by tests.
        wall: seconds since the epoch, so that spans of several processes lie on one axis.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        state: State = "starting",
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._offset = wall() - clock()
        self._state: State = state
        self._since = clock()
        self._span_start = self._since
        self.seconds: dict[str, float] = {}
        self._spans: list[tuple[str, float, float]] = []

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    def enter(self, state: State) -> None:
        """Change the state; entering the present one is free."""
        if state == self._state:
            return
        with self._lock:
            now = self._clock()
            self._account(now)
            self._close_span(now)
            self._state = state

    @contextmanager
    def during(self, state: State) -> Iterator[None]:
        """Be in ``state`` for a block, then return to the state before."""
        before = self._state
        self.enter(state)
        try:
            yield
        finally:
            self.enter(before)

    def drain(self) -> dict[str, Any]:
        """Seconds per state so far (cumulative) and the spans since the last drain, for a heartbeat."""
        with self._lock:
            now = self._clock()
            self._account(now)
            self._close_span(now)
            spans, self._spans = self._spans, []
            return {"state": self._state, "seconds": {k: round(v, 6) for k, v in self.seconds.items()}, "spans": spans}

    def _account(self, now: float) -> None:
        self.seconds[self._state] = self.seconds.get(self._state, 0.0) + (now - self._since)
        self._since = now

    def _close_span(self, now: float) -> None:
        if now > self._span_start and len(self._spans) < _MAX_SPANS:
            self._spans.append((self._state, self._span_start + self._offset, now + self._offset))
        self._span_start = now


def utilization(seconds: dict[str, float]) -> float:
    """Fraction of wall-clock (``starting`` excluded) in the states of ``WORK``; 0 when nothing was measured."""
    total = sum(v for k, v in seconds.items() if k != "starting")
    return sum(v for k, v in seconds.items() if k in WORK) / total if total > 0 else 0.0
