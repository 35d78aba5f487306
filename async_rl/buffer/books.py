"""The books: where each attempt is, and how many ended how; the transitions that keep them closed.

open, scoring, ready, delivered ── _retire ─► trained     _filter ─► filtered(reason)     _fail ─► failed(reason), retry

At the end: how a restored ledger gets back what it had, see :mod:`async_rl.buffer.journal`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

import numpy as np

from async_rl.buffer.annotating import awaited, without_reference
from async_rl.buffer.answers import Answers
from async_rl.buffer.records import Answer, Delivery, Entry, Lost, Rules
from async_rl.buffer.scoring import Scoring
from async_rl.buffer.shelf import Shelf
from async_rl.buffer.tally import Tally
from async_rl.data import Group


class Books:
    """Attempts by state, and the counts."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.open = Shelf()
        """By ordinal, in order of issue and so of lease expiry."""
        self.scoring = Scoring(rules)
        self.ready = Shelf()
        self.delivered: dict[int, list[Entry]] = {}
        """By step."""
        self.retry: list[tuple[int, int, int, int]] = []
        """Heap of (ordinal, next attempt, task, draw) to be issued before fresh ordinals."""
        self.leases: Counter[str] = Counter()
        """Open attempts by actor."""
        self.next_ordinal = 0
        """The task stream was read up to here."""
        self.abandoned = 0
        """Tasks that were not done when the run ended."""
        self.held_bytes = 0
        self.issued = 0
        self.trained = 0
        self.filtered: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.tally = Tally()
        self._answers = Answers()

    def group(self, ordinal: int) -> Group | None:
        """The submitted group of a live attempt in scoring or ready."""
        entry = self.scoring.get(ordinal) or self.ready.get(ordinal)
        return entry.group if entry is not None else None

    def delivery(self, step: int) -> Delivery | None:
        """What was delivered as this step and is not trained yet, once more."""
        entries = self.delivered.get(step)
        return Delivery(step, tuple(e.payload for e in entries), ()) if entries is not None else None

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

    def tasks(self) -> dict[str, int]:
        """The same by ordinal: each that was begun is in one place."""
        held = self.outstanding + sum(map(len, self.delivered.values()))
        return {
            "begun": self.next_ordinal,
            "held": held,
            "waiting": len(self.retry),
            "trained": self.trained,
            "filtered": self.filtered.total(),
            "abandoned": self.abandoned,
        }

    # ------------------------------------------------------------------ transitions

    def _hold(self, entry: Entry, group: Group) -> None:
        entry.group, entry.nbytes = group, group.nbytes
        entry.deadline = group.oldest_version + self.rules.max_staleness
        self.held_bytes += entry.nbytes

    def _fail(self, entry: Entry, reason: str, *, by_content: bool = False) -> None:
        """Terminal for the attempt, from any state; the ordinal is tried again, with a new draw if it was to blame."""
        if entry.group is not None:
            self.tally.add(entry.group, "lost")
        self._remove(entry)
        self._try_again(entry.ordinal, entry.attempt, entry.task_index, entry.draw + by_content, reason)

    def _try_again(self, ordinal: int, attempt: int, task_index: int, draw: int, reason: str) -> None:
        self.failed[reason] += 1
        heapq.heappush(self.retry, (ordinal, attempt + 1, task_index, draw))

    def _take_back(self, entries: Iterable[Entry], reason: str) -> list[Lost]:
        """Fail them; the holders of those that are open are returned."""
        lost = []
        for entry in entries:
            if entry.ordinal in self.open:
                lost.append(Lost(entry.actor, *entry.key, reason))
                self._answers.put(entry.key, Answer("late", reason, fresh=True))
            self._fail(entry, reason)
        self.check()
        return lost

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

    def check(self) -> None:
        """Raise :class:`RuntimeError` unless the books close, by attempts and by tasks."""
        here = self.outstanding + sum(map(len, self.delivered.values())) + self.trained + sum(self.filtered.values())
        if self.issued != here + sum(self.failed.values()):
            raise RuntimeError(f"the books do not close: {self.books()}")
        if self.next_ordinal != here + len(self.retry) + self.abandoned:
            raise RuntimeError(f"a task is in no place, or in two: {self.tasks()}")

    # ------------------------------------------------------------------ restored

    def reopen(self, entry: Entry) -> None:
        """An attempt that its holder still has."""
        self.open[entry.ordinal] = entry
        self.leases[entry.actor] += 1

    def requeue(self, ordinal: int, attempt: int, task_index: int, draw: int) -> None:
        """An attempt whose holder is gone is failed; the ordinal is issued again."""
        self._answers.put((ordinal, attempt), Answer("late", "resumed", fresh=True))
        self._try_again(ordinal, attempt, task_index, draw, "resumed")

    def readmit(self, entry: Entry, group: Group) -> None:
        """A submitted group: it is ready, or in scoring if a stage has not annotated it.

        One whose rewards no stage will give is requeued. What a stage added that this run no longer has is dropped: a
        batch has the same arrays throughout.
        """
        if "reference" not in self.rules.stages:
            group = without_reference(group)
        stages = awaited(group, self.rules.stages)
        if stages and entry.uses:  # it was trained, and is not annotated for the sake of another time
            self.trained += 1
            return
        if not np.isfinite(group.rewards).all() and "reward" not in stages:
            self.requeue(*entry.key, entry.task_index, entry.draw)
            return
        self._hold(entry, group)
        self._answers.put(entry.key, Answer("accepted"))
        if stages:
            self.scoring.put(entry)
        else:
            self.ready[entry.ordinal] = entry
