"""The work of one stage: which submitted groups wait for it, and which scorer has which. Pure.

add ─► waiting ─ lease ─► leased(scorer) ─ finish ─► gone          the most urgent group first
          ▲                  │ give_back: expired, failed, lost scorer
          └──────────────────┘                                     remove: the group has moved on

A group that was with a scorer that died is suspect: from then on a scorer has it alone, so that it is known which group
kills scorers, and none that only lay beside it is blamed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from async_rl.buffer.records import Entry


@dataclass(slots=True)
class Work:
    """What the stage owes one group."""

    entry: Entry
    scorer: str = ""
    """Who has it now; empty: nobody."""
    since: float = 0.0
    """Time of its lease."""
    tries: int = 0
    """Times that a scorer failed at it."""
    deaths: int = 0
    """Times that a scorer died while it had it."""
    holders: set[str] = field(default_factory=set)
    """Who has it or once had it: what they send is welcome, whoever is first."""


class StageQueue:
    """Work by ordinal; each is with one scorer at a time."""

    def __init__(self) -> None:
        self._works: dict[int, Work] = {}
        self._waiting: list[tuple[int, int, int]] = []
        """Heap of (deadline, ordinal, attempt); what is leased or gone is skipped when it comes up."""
        self._leased: dict[int, Work] = {}
        """In order of lease and so of expiry."""
        self.leases: Counter[str] = Counter()
        """Groups by scorer."""
        self.annotated = 0
        self.failed = 0
        """Tries that scorers gave up, or whose result was refused."""
        self.returned = 0
        """Leases that ran out or were lost with their scorer."""
        self.seconds = 0.0
        """Wall-clock in which some scorer had work, up to the newest annotation."""
        self._counted_to = 0.0

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._works

    @property
    def waiting(self) -> int:
        """Groups that no scorer has."""
        return len(self._works) - len(self._leased)

    def add(self, entry: Entry) -> None:
        """A group that needs this stage."""
        self._works[entry.ordinal] = Work(entry)
        self._offer(entry)

    def lease(self, scorer: str, now: float) -> Entry | None:
        """Give the most urgent waiting group to ``scorer``; ``None``: none waits, or it must first end what it has."""
        while self._waiting:
            _, ordinal, attempt = self._waiting[0]
            work = self._works.get(ordinal)
            is_stale = work is None or work.scorer or work.entry.attempt != attempt
            if work is not None and not is_stale and self._must_end_first(scorer, work):
                return None
            heapq.heappop(self._waiting)
            if work is None or is_stale:
                continue
            if not self._leased:
                self._counted_to = now
            work.scorer, work.since = scorer, now
            work.holders.add(scorer)
            self._leased[ordinal] = work
            self.leases[scorer] += 1
            return work.entry
        return None

    def find(self, ordinal: int, attempt: int) -> Work | None:
        """The work at this attempt, if it is not done."""
        work = self._works.get(ordinal)
        return work if work is not None and work.entry.attempt == attempt else None

    def finish(self, ordinal: int, now: float) -> None:
        """The group is annotated."""
        if self._leased:
            self.seconds += now - self._counted_to
            self._counted_to = now
        self.annotated += 1
        self.remove(ordinal)

    def give_back(self, ordinal: int) -> None:
        """Its scorer has it no longer; another may take it."""
        work = self._leased[ordinal]
        self._end_lease(work)
        self._offer(work.entry)

    def lose(self, scorer: str, *, died: bool) -> list[Work]:
        """A scorer is gone: all that it has goes back, and is suspect if it ``died``; returns it."""
        mine = [work for work in self._leased.values() if work.scorer == scorer]
        for work in mine:
            work.deaths += died
        self._give_all_back([work.entry.ordinal for work in mine])
        del self.leases[scorer]
        return mine

    def free(self) -> None:
        """Nobody has anything any more; what those who had it still send is welcome."""
        self._give_all_back(list(self._leased))

    def expire(self, now: float, limit_s: float) -> None:
        """What was leased for longer than ``limit_s`` goes back."""
        late = []
        for ordinal, work in self._leased.items():
            if now - work.since <= limit_s:
                break
            late.append(ordinal)
        self._give_all_back(late)

    def remove(self, ordinal: int) -> None:
        """The group needs this stage no longer; nothing happens if it never did."""
        work = self._works.pop(ordinal, None)
        if work is not None and work.scorer:
            self._end_lease(work)

    def to_plain(self) -> dict[str, Any]:
        """For ``books.json`` and ``status``; ``annotated / seconds`` is the rate while there was work."""
        return {
            "annotated": self.annotated,
            "seconds": round(self.seconds, 3),
            "failed": self.failed,
            "returned": self.returned,
            "waiting": self.waiting,
            "leased": len(self._leased),
        }

    def freeze(self) -> dict[str, Any]:
        """All of it in plain types: leases in their order, then what waits."""
        waiting = sorted((w for w in self._works.values() if not w.scorer), key=lambda w: w.entry.ordinal)
        works = [*self._leased.values(), *waiting]
        return {
            "counts": [self.annotated, self.failed, self.returned, self.seconds, self._counted_to],
            "works": [[w.entry.ordinal, w.scorer, w.since, w.tries, w.deaths, sorted(w.holders)] for w in works],
        }

    def restore(self, plain: dict[str, Any]) -> None:
        """Take up what :meth:`freeze` gave, for the same entries; they were added before."""
        self.annotated, self.failed, self.returned, self.seconds, self._counted_to = plain["counts"]
        for ordinal, scorer, since, tries, deaths, holders in plain["works"]:
            work = self._works[ordinal]
            work.scorer, work.since, work.tries, work.deaths, work.holders = scorer, since, tries, deaths, set(holders)
            if scorer:
                self._leased[ordinal] = work
                self.leases[scorer] += 1

    def _must_end_first(self, scorer: str, work: Work) -> bool:
        """Whether one of both, this work and what the scorer has, is suspect."""
        has = [w for w in self._leased.values() if w.scorer == scorer] if self.leases[scorer] else []
        return bool(has) and (work.deaths > 0 or any(w.deaths for w in has))

    def _give_all_back(self, ordinals: list[int]) -> None:
        for ordinal in ordinals:
            self.give_back(ordinal)
        self.returned += len(ordinals)

    def _offer(self, entry: Entry) -> None:
        heapq.heappush(self._waiting, (entry.deadline, *entry.key))

    def _end_lease(self, work: Work) -> None:
        del self._leased[work.entry.ordinal]
        self.leases[work.scorer] -= 1
        work.scorer = ""
