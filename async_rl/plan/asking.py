"""Which actor gets the next ticket: of those that could take one, who holds the fewest, as the server does.

actor has room ─► ask ─► heap of its live version ─ has the version room? ─► next
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

from async_rl.buffer.ledger import Ledger
from async_rl.plan.actor import Actor


class Asking:
    """Actors that could take a ticket, with what is outdated left in until it comes up."""

    def __init__(self, actors: Sequence[Actor], ledger: Ledger) -> None:
        self._actors, self._ledger = actors, ledger
        self._heaps: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """By live version: (open tickets, actor)."""

    def ask(self, index: int) -> None:
        """An actor may have got room, or another version, or fewer tickets."""
        actor = self._actors[index]
        asks = actor.version, self._ledger.leases[actor.name]
        if actor.room > 0 and actor.asked != asks:
            actor.asked = asks
            heapq.heappush(self._heaps[actor.version], (asks[1], index))

    def next(self) -> int | None:
        """The actor that gets a ticket now, and asks no more; ``None``: nobody can."""
        best: tuple[int, int, int] | None = None
        for version, heap in list(self._heaps.items()):
            while heap and not self._is_current(version, *heap[0]):
                self._take_off(version)
            if not heap:
                del self._heaps[version]
            elif self._ledger.has_room(version) and (best is None or (*heap[0], version) < best):
                best = (*heap[0], version)
        return None if best is None else self._take_off(best[2])

    def _is_current(self, version: int, leases: int, index: int) -> bool:
        actor = self._actors[index]
        return actor.asked == (version, leases) == (actor.version, self._ledger.leases[actor.name]) and actor.room > 0

    def _take_off(self, version: int) -> int:
        leases, index = heapq.heappop(self._heaps[version])
        actor = self._actors[index]
        actor.asked = None if actor.asked == (version, leases) else actor.asked
        return index
