"""The books: where each attempt is, and how many ended how; the transitions that keep them closed.

open, scoring, ready, delivered ── _retire ─► trained     _filter ─► filtered(reason)     _fail ─► failed(reason), retry
"""

from __future__ import annotations

import heapq
from collections import Counter

from async_rl.buffer.records import Entry, Rules
from async_rl.buffer.scoring import Scoring
from async_rl.buffer.tally import Tally
from async_rl.data import Group


class Books:
    """Attempts by state, and the counts."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.open: dict[int, Entry] = {}
        """By ordinal, in order of issue and so of lease expiry."""
        self.scoring = Scoring(rules)
        self.ready: dict[int, Entry] = {}
        self.delivered: dict[int, list[Entry]] = {}
        """By step."""
        self.retry: list[tuple[int, int, int]] = []
        """Heap of (ordinal, next attempt, task) to be issued before fresh ordinals."""
        self.leases: Counter[str] = Counter()
        """Open attempts by actor."""
        self.held_bytes = 0
        self.issued = 0
        self.trained = 0
        self.filtered: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.tally = Tally()

    def group(self, ordinal: int) -> Group | None:
        """The submitted group of a live attempt in scoring or ready."""
        entry = self.scoring.get(ordinal) or self.ready.get(ordinal)
        return entry.group if entry is not None else None

    @property
    def outstanding(self) -> int:
        """Attempts that some later step has to train: open + scoring + ready."""
        return len(self.open) + len(self.scoring) + len(self.ready)

    def books(self) -> dict[str, int]:
        """The counts that close."""
        return {
            "issued": self.issued,
            "open": len(self.open),
            "scoring": len(self.scoring),
            "ready": len(self.ready),
            "delivered": sum(map(len, self.delivered.values())),
            "trained": self.trained,
            "filtered": self.filtered.total(),
            "failed": self.failed.total(),
        }

    # ------------------------------------------------------------------ transitions

    def _hold(self, entry: Entry, group: Group) -> None:
        entry.group, entry.nbytes = group, group.nbytes
        entry.deadline = group.oldest_version + self.rules.max_staleness
        self.held_bytes += entry.nbytes

    def _fail(self, entry: Entry, reason: str) -> None:
        """Terminal for the attempt, from any state; the ordinal is tried again."""
        if entry.group is not None:
            self.tally.add(entry.group, "lost")
        self._remove(entry)
        self.failed[reason] += 1
        heapq.heappush(self.retry, (entry.ordinal, entry.attempt + 1, entry.task_index))

    def _filter(self, entry: Entry, reason: str) -> None:
        """Terminal for the ordinal."""
        self._remove(entry)
        self.filtered[reason] += 1

    def _remove(self, entry: Entry) -> None:
        if entry.ordinal in self.open:
            self._close_open(entry)
        self.scoring.remove(entry.ordinal)
        self.ready.pop(entry.ordinal, None)
        self._release(entry)

    def _close_open(self, entry: Entry) -> None:
        del self.open[entry.ordinal]
        self.leases[entry.actor] -= 1

    def _retire(self, entry: Entry) -> None:
        self.trained += 1
        self._release(entry)

    def _release(self, entry: Entry) -> None:
        self.held_bytes -= entry.nbytes
        entry.group, entry.nbytes = None, 0

    def _check(self) -> None:
        books = self.books()
        if books["issued"] != sum(books.values()) - books["issued"]:
            raise RuntimeError(f"the books do not close: {books}")
