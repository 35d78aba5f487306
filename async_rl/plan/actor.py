"""An actor in virtual time: slots that sequences run through, and the versions that stamp their tokens.

ticket ─► held back ─► queue ─slot free─► running ─its time has passed─► tokens by version ─► all of a group: submitted
           └ drained, until the swap         ▲ swap: in flight (sequences go on, with both versions), or once all ended

It does what :mod:`actors.rollout` does. A pause stops the actor's own clock: ``local = now - stopped``.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from async_rl.protocol import Ticket


@dataclass(slots=True, eq=False)
class Work:
    """A group that is generated."""

    ticket: Ticket
    missing: int
    """Sequences that have not ended."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Of the sequences that have, by version."""
    length: int = 0
    """Tokens of all of them."""


class Actor:
    """One actor.

    Args:
        name: as the ledger knows it.
        slots: sequences that run at the same time.
        group_size: sequences of a ticket.
        token_s: seconds for which a slot decodes one token.
        drains: whether everything that has begun ends before weights are swapped.
    """

    __slots__ = (
        "_drains",
        "_group_size",
        "_held_back",
        "_order",
        "_queue",
        "_running",
        "_slots",
        "_swaps",
        "_token_s",
        "asked",
        "due",
        "name",
        "newest",
        "paused",
        "scheduled",
        "stopped",
        "version",
    )

    def __init__(self, name: str, *, slots: int, group_size: int, token_s: float, drains: bool) -> None:
        self.name = name
        self.asked: tuple[int, int] | None = None
        """(version, open tickets) with which it last asked for a ticket, and has not got one."""
        self.version = 0
        """Live."""
        self.newest = 0
        """Arrived; it is live after the swap."""
        self.stopped = 0.0
        """Seconds for which its clock has stood still."""
        self.paused = False
        self.due, self.scheduled = math.inf, -1
        """When it will be woken, and the event that does it; older ones count nothing."""
        self._slots, self._group_size, self._token_s, self._drains = slots, group_size, token_s, drains
        self._held_back: list[tuple[Work, list[int]]] = []
        self._queue: deque[tuple[Work, int]] = deque()
        self._running: list[tuple[float, int, float, int, Work]] = []
        """Heap: end, order, start (local), tokens, group."""
        self._order = 0
        self._swaps: list[tuple[float, int]] = [(-math.inf, 0)]
        """Since when (local) each version stamps tokens."""

    @property
    def active(self) -> int:
        """Slots that generate now."""
        return 0 if self.paused else len(self._running)

    @property
    def next_end(self) -> float:
        """Local time at which the next sequence ends; infinite while nothing runs."""
        return self._running[0][0] if self._running else math.inf

    @property
    def is_ready_to_swap(self) -> bool:
        """Whether newer weights are there and may be taken now."""
        return self.newest > self.version and not self.paused and not (self._drains and self._running)

    @property
    def room(self) -> int:
        """Tickets that it could take now: as many as fill the slots, and one that waits."""
        unfinished = len(self._running) + len(self._queue) + self._group_size * len(self._held_back)
        return max(0, -((unfinished - self._slots - self._group_size) // self._group_size))

    def take(self, work: Work, lengths: list[int], local: float) -> None:
        """A ticket came; its sequences have these lengths."""
        self._held_back.append((work, lengths))
        self._begin(local)

    def end(self, local: float) -> list[Work]:
        """What runs no longer than until ``local`` is over; returns the groups that are complete by it."""
        complete = []
        while self._running and self._running[0][0] <= local:
            end, _, start, length, work = heapq.heappop(self._running)
            for version, count in stamped(start, end, length, self._swaps):
                work.tokens[version] = work.tokens.get(version, 0) + count
            work.length += length
            work.missing -= 1
            if not work.missing:
                complete.append(work)
            self._start(end)
        return complete

    def drop(self, work: Work, local: float) -> None:
        """The ticket was taken back: its sequences stop, their slots are free."""
        self._held_back = [item for item in self._held_back if item[0] is not work]
        self._queue = deque(item for item in self._queue if item[0] is not work)
        self._running = [item for item in self._running if item[4] is not work]
        heapq.heapify(self._running)
        self._start(local)

    def swap(self, local: float) -> None:
        """The newest version is live from now on."""
        self.version = self.newest
        oldest = min((start for _, _, start, _, _ in self._running), default=local)
        keep = max(i for i, (since, _) in enumerate(self._swaps) if since <= oldest)
        self._swaps = [*self._swaps[keep:], (local, self.version)]

    def resume(self, local: float) -> None:
        """The swap is over: what was held back begins."""
        self.paused = False
        self._begin(local)

    def _begin(self, local: float) -> None:
        if self.paused or (self._drains and self.newest > self.version):
            return
        for work, lengths in self._held_back:
            self._queue.extend((work, length) for length in lengths)
        self._held_back.clear()
        self._start(local)

    def _start(self, local: float) -> None:
        while self._queue and len(self._running) < self._slots:
            work, length = self._queue.popleft()
            self._order += 1
            heapq.heappush(self._running, (local + length * self._token_s, self._order, local, length, work))


def stamped(start: float, end: float, length: int, swaps: Sequence[tuple[float, int]]) -> Iterator[tuple[int, int]]:
    """How many tokens of a sequence carry each version, newest first.

    Token j of n is emitted at start + (end - start) · (j + 1) / n, and carries the version that is live then.

    Args:
        start: of the sequence.
        end: of it.
        length: n.
        swaps: since when each version is live, in order; the first one before ``start``.
    """
    left = length
    for since, version in reversed(swaps):
        if since <= start:
            yield version, left
            return
        before = min(left, math.ceil((since - start) / (end - start) * length) - 1)
        if before < left:
            yield version, left - before
            left = before
        if not left:
            return
