"""The watchdog: notices that no group becomes ready any more, and names who holds the oldest ones.

What feeds it is a group that becomes *ready*. That a group was accepted is not enough: while every scorer fails at its
groups, or filters them, actors would go on to submit for ever and no step would be trained.
"""

from __future__ import annotations

from collections.abc import Iterable

from async_rl.buffer.records import Entry, Stale

TABLE_ROWS = 10


class Watchdog:
    """Barks when work waits and no group became ready for ``limit_s``; ``rounds`` counts the barks in a row."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._quiet_since: float | None = None
        self._expired: list[Stale] = []
        self.rounds = 0

    def fed(self, now: float) -> None:
        """A group became ready: all is well."""
        self._quiet_since, self.rounds = now, 0
        self._expired.clear()

    def expired(self, entry: Entry, now: float) -> None:
        """A lease ran out; its holder belongs into the table although the ticket is gone."""
        if len(self._expired) < TABLE_ROWS:
            self._expired.append(_row(entry, now, "expired"))

    def barks(self, now: float, *, work_waits: bool) -> bool:
        """Whether a round begins."""
        if self._quiet_since is None or not work_waits:
            self._quiet_since = now
        if now - self._quiet_since <= self._limit_s:
            return False
        self._quiet_since = now
        self.rounds += 1
        return True

    def table(self, waiting: Iterable[tuple[Entry, str]], now: float) -> tuple[Stale, ...]:
        """The oldest attempts, given with their states, since a group last became ready."""
        rows = [_row(entry, now, state) for entry, state in waiting]
        return tuple(sorted([*self._expired, *rows], key=lambda r: (-r.age_s, r.ordinal))[:TABLE_ROWS])


def _row(entry: Entry, now: float, state: str) -> Stale:
    return Stale(entry.actor, entry.ordinal, entry.attempt, now - entry.issued_at, state)
