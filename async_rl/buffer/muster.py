"""Where the ranks of a learner group over several hosts find each other, for each life of the group anew.

recruit: muster(settings, store) ─► all ranks are here ─► mustered(store of rank 0) to everybody
                                     └─ not yet: they wait, and after some seconds it is said who is missing

A rank musters before there is a process group, so nothing of an earlier life is known or needed: the store is fresh,
and a rank that died while it waited is replaced by its next process. The server only introduces them to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from async_rl.buffer.fields import shown, take
from async_rl.buffer.post import Post
from async_rl.buffer.roster import Session
from async_rl.wire import Header

NOTICE_S = 5.0
"""Who is missing is said once others have waited for so long."""
_MOST_NAMED = 8
_MOST_STORE = 300
_ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Recruit:
    """A rank that waits."""

    session: Session
    store: str
    """``HOST:PORT`` of the store that rank 0 has opened for this life; empty for the others."""
    since: float


class Muster:
    """The ranks that wait for the others.

    Args:
        post: where messages go.
        settings: of the server, :func:`async_rl.config.shared.shared_settings`: the ranks must have the same.
    """

    def __init__(self, post: Post, settings: Mapping[str, str]) -> None:
        self._post = post
        self._settings = dict(settings)
        self._waiting: dict[int, Recruit] = {}
        self._rivals: dict[int, tuple[Recruit, Session]] = {}
        """Who came with a number that another host has: its next process (a container started anew), or a mistake."""

    def come(self, session: Session, header: Header, now: float) -> None:
        """A rank waits for the others; the last one brings them together. One that cannot take part is refused.

        Raises:
            WireError: a field is missing or of the wrong type.
        """
        store, settings = take(header, "store", str), take(header, "settings", dict)
        recruit = Recruit(session, store[:_MOST_STORE], now)
        if why := self._differences(settings) or self._other_world(session):
            self._refuse(session, why)
        elif (before := self._waiting.get(session.rank)) is not None and before.session.host != session.host:
            self._rivals[session.rank] = recruit, before.session
        else:
            self._take(recruit)

    def leave(self, session: Session) -> None:
        """A client is gone; perhaps it waited."""
        recruit = self._waiting.get(session.rank)
        if recruit is not None and recruit.session is session:
            del self._waiting[session.rank]

    def tick(self) -> None:
        """Of two hosts with one number the first has it if it is heard again; else that is dead, the second has it."""
        for rank, (rival, first) in list(self._rivals.items()):
            if first.heard > rival.since:
                host = first.host.partition("/")[0]
                why = f"rank {rank} is here already, from {host}: give each learner host its own --node-rank"
                self._refuse(rival.session, why)
            elif first.gone and not rival.session.gone:
                self._take(rival)
            elif not rival.session.gone:
                continue
            del self._rivals[rank]

    def notices(self, now: float) -> list[str]:
        """Which ranks are missing while others wait for long; empty else."""
        if not any(now - recruit.since >= NOTICE_S for recruit in self._waiting.values()):
            return []
        world = next(iter(self._waiting.values())).session.world
        missing = [str(rank) for rank in range(world) if rank not in self._waiting]
        named = ", ".join(missing[:_MOST_NAMED]) + (", ..." if len(missing) > _MOST_NAMED else "")
        return [f"{len(self._waiting)} of {world} learner ranks are here; missing: {named}"]

    def _take(self, recruit: Recruit) -> None:
        world = recruit.session.world
        self._waiting[recruit.session.rank] = recruit
        if len(self._waiting) == world:
            meeting = self._waiting[0].store
            self._post.send_all((r.session for r in self._waiting.values()), "mustered", store=meeting)
            self._waiting.clear()

    def _refuse(self, session: Session, why: str) -> None:
        print(f"refused {session.name!r}: {why}", flush=True)
        self._post.send(session, "refused", reason=why, code="hello")

    def _other_world(self, session: Session) -> str:
        """What is wrong if those that wait belong to a group of another size."""
        worlds = {recruit.session.world for recruit in self._waiting.values()} - {session.world}
        if not worlds:
            return ""
        return (
            f"this rank belongs to a group of {session.world}, those that wait to one of {worlds.pop()}: give all "
            "learner hosts the same learner.ranks and --nnodes"
        )

    def _differences(self, settings: Mapping[str, object]) -> str:
        """Ranks with other settings would make other updates, which shows only when their parameters are compared."""
        keys = {*self._settings, *(key for key in settings if isinstance(key, str))}
        pairs = [(key, settings.get(key, _ABSENT), self._settings.get(key, _ABSENT)) for key in sorted(keys)]
        differing = [
            f"{shown(key, 60)} is {shown(theirs, 60)} here and {shown(ours, 60)} on the first host"
            for key, theirs, ours in pairs
            if theirs != ours
        ]
        same = "start all learner hosts from the same CONFIG.toml with the same --set"
        return f"{'; '.join(differing[:_MOST_NAMED])}: {same}" if differing else ""
