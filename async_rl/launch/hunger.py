"""How many actors a run needs: who waits for whom, by what clients say of their time. Pure: the clock is passed in.

status ─► clients' seconds per state ─► hunger (shares of a window) ─► wanted ─► Appetite: the same twice? ─► a change

Two thresholds apart keep it still: actors are added while the learner waits for data in more than :data:`HUNGRY` of its
time, and one is taken away only while it waits in less than :data:`FED` and the others would still have time to spare.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HUNGRY = 0.10
"""The learner waits for data in more of its time than this: more actors are needed."""
FED = 0.03
"""It waits in less than this: fewer may do."""
BUSY = 0.10
"""Actors that wait for tickets in more of their time than this would not be helped by others."""
SPARE = 0.15
"""The actors that stay must still wait in so much of their time, or the learner would soon be hungry again."""
HOLDS = 2
"""So many windows in a row must say the same before anything is changed."""

_NOISE = 0.05
"""So small a part of an actor is not worth another one."""

Client = Mapping[str, Any]
"""A row of ``clients`` in a ``status`` message: ``name``, ``pid``, ``host``, ``role``, ``state``, ``seconds``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunger:
    """Who waited in a window, as shares of wall-clock between 0 and 1; start-up is left out."""

    learner: float
    """All ranks of the learner, for data."""
    actors: float
    """All actors, for tickets: the buffer was full."""


def hunger(before: Sequence[Client], after: Sequence[Client]) -> Hunger | None:
    """What was spent on waiting between two looks, by processes that were there at both.

    Args:
        before: clients of the earlier ``status``.
        after: of the later one.

    Returns:
        ``None`` if learner or actors have told of no time between them.
    """
    learner = _share(before, after, "learner", "waiting_data")
    actors = _share(before, after, "actor", "waiting_ticket")
    return None if learner is None or actors is None else Hunger(learner=learner, actors=actors)


def wanted(count: int, hungry: Hunger, least: int, most: int) -> int:
    """How many actors there should be.

    Up: n actors feed a learner that waits L of its time with (1 − L) of what it could eat, so n / (1 − L) would do; no
    more than twice as many at once. Down: n actors that wait w of their time do the work of n (1 − w), so one less
    would wait 1 − n (1 − w) / (n − 1) of it.

    Args:
        count: there are now.
        hungry: who waits.
        least: never fewer.
        most: never more.
    """
    aim = count
    if hungry.learner > HUNGRY and hungry.actors < BUSY:
        enough = math.ceil(count / (1 - hungry.learner) - _NOISE) if hungry.learner < 0.5 else 2 * count
        aim = max(count + 1, enough)
    elif hungry.learner < FED and count > 1 and 1 - count * (1 - hungry.actors) / (count - 1) >= SPARE:
        aim = count - 1
    return max(least, min(aim, most))


class Appetite:
    """Turns looks at a run into changes of the number of actors, slowly enough to see what each has changed.

    Args:
        least: actors at any time.
        window_s: over which waiting is measured; clients must speak in it.
    """

    def __init__(self, least: int, window_s: float) -> None:
        self._least, self._window_s = least, window_s
        self._before: tuple[float, Sequence[Client]] | None = None
        self._direction, self._held = 0, 0
        self.last: Hunger | None = None
        """The newest measurement."""

    def look(self, clients: Sequence[Client], names: Collection[str], most: int, now: float) -> int:
        """How many actors there should be from now on.

        Args:
            clients: of a ``status``; actors that somebody has started by hand may be among them.
            names: of the actors that were started here; while one of them is on its way, nothing is measured.
            most: never more, which may change as the cluster fills.
            now: the clock, in seconds.
        """
        count = len(names)
        if not set(names) <= {c["name"] for c in clients if c["role"] == "actor" and c["state"] != "starting"}:
            self._begin(None)
            return count
        if self._before is None:
            self._begin((now, clients))
            return count
        since, before = self._before
        if now - since < self._window_s:
            return count
        self._before = (now, clients)
        found = hunger(before, clients)
        if found is None:
            return count
        self.last = found
        aim = wanted(count, found, min(self._least, most), most)
        direction = (aim > count) - (aim < count)
        self._held = self._held + 1 if direction == self._direction else 1
        self._direction = direction
        if direction == 0 or self._held < HOLDS:
            return count
        self._begin(None)
        return aim

    def _begin(self, before: tuple[float, Sequence[Client]] | None) -> None:
        self._before = before
        self._direction, self._held = 0, 0


def _share(before: Sequence[Client], after: Sequence[Client], role: str, state: str) -> float | None:
    """Share of the time of all clients of a role that passed in a state."""
    earlier = {_process(client): client["seconds"] for client in before}
    waited = total = 0.0
    for client in after:
        if client["role"] != role or _process(client) not in earlier:
            continue
        was, seconds = earlier[_process(client)], client["seconds"]
        spent = {name: s - was.get(name, 0.0) for name, s in seconds.items() if name != "starting"}
        waited += spent.get(state, 0.0)
        total += sum(spent.values())
    return min(1.0, max(0.0, waited / total)) if total > 0 else None


def _process(client: Client) -> tuple[Any, ...]:
    """A process in its present life."""
    return client["name"], client["pid"], client["host"]
