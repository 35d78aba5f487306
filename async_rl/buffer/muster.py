"""Where the ranks of a learner group over several hosts find each other, for each life of the group anew.

recruit: muster(settings, group, store) ─► all ranks are here ─► mustered(store of rank 0) to everybody
                                            └─ not yet: they wait, and after some seconds it is said who is missing

A rank musters before there is a process group, so nothing of an earlier life is known or needed: the store is fresh,
and a rank that died while it waited is replaced by its next process. The server only introduces them to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from async_rl.buffer.fields import shown, take
from async_rl.buffer.post import Post
from async_rl.buffer.roster import Roster, Session
from async_rl.wire import Header

NOTICE_S = 5.0
"""Who is missing is said once others have waited for so long."""
_MOST_NAMED = 8
_MOST_STORE = 300
_MOST_GROUP = 120
_SIGNS = 2
"""So many looks at which there was something new from a process prove that it lives: what it sent before its death may
arrive late, but then at once."""
_ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Recruit:
    """A rank that waits."""

    session: Session
    store: str
    """``HOST:PORT`` of the store that rank 0 has opened for this life; empty for the others."""
    group: str
    """What all ranks must have in common beside the settings, as a phrase."""
    since: float

    @property
    def kind(self) -> str:
        """Of the group that it belongs to."""
        return f"{self.session.world} ranks ({self.group})"


@dataclass(slots=True)
class Rival:
    """A rank whose number another process has: the next life of that (a container started anew), or a mistake."""

    recruit: Recruit
    holder: Session
    seq: int
    """Number of the newest message of the other process that was looked at."""
    signs: int = 0


class Muster:
    """The ranks that wait for the others.

    Args:
        post: where messages go.
        roster: the clients.
        settings: of the server, :func:`async_rl.config.shared.shared_settings`: the ranks must have the same.
    """

    def __init__(self, post: Post, roster: Roster, settings: Mapping[str, str]) -> None:
        self._post, self._roster = post, roster
        self._settings = dict(settings)
        self._waiting: dict[int, Recruit] = {}
        self._rivals: dict[int, Rival] = {}
        self._homes: dict[int, str] = {}
        """Hosts from which ranks have come, to say where one is missed."""

    def come(self, session: Session, header: Header, now: float) -> None:
        """A rank waits for the others; the last one brings them together. One that cannot take part is refused.

        Raises:
            WireError: a field is missing or of the wrong type.
        """
        store, settings = take(header, "store", str)[:_MOST_STORE], take(header, "settings", dict)
        recruit = Recruit(session, store, shown(take(header, "group", str), _MOST_GROUP), now)
        if why := self._differences(settings) or self._other_group(recruit):
            self._refuse(session, why)
        elif (holder := self._holder(session)) is not None:
            self._rivals[session.rank] = Rival(recruit, holder, holder.seq)
        else:
            self._take(recruit)

    def leave(self, session: Session) -> None:
        """A client is gone; perhaps it waited."""
        recruit = self._waiting.get(session.rank)
        if recruit is not None and recruit.session is session:
            del self._waiting[session.rank]

    def tick(self) -> None:
        """Of two processes with one number the first has it if it is heard again; else that is dead."""
        for rank, rival in list(self._rivals.items()):
            session, holder = rival.recruit.session, rival.holder
            if holder.seq > rival.seq:
                rival.seq, rival.signs = holder.seq, rival.signs + 1
            if rival.signs >= _SIGNS:
                host = holder.host.partition("/")[0]
                self._refuse(
                    session, f"rank {rank} is here already, from {host}: give each learner host its own --node-rank"
                )
            elif session.gone or holder.gone:
                if not session.gone:
                    self._take(rival.recruit)
            else:
                continue
            del self._rivals[rank]

    def missing(self) -> str:
        """Who is waited for, as a sentence; empty if nobody waits."""
        if not self._waiting:
            return ""
        world = next(iter(self._waiting.values())).session.world
        absent = [rank for rank in range(world) if rank not in self._waiting]
        named = ", ".join(map(self._named, absent[:_MOST_NAMED])) + (", ..." if len(absent) > _MOST_NAMED else "")
        return f"{len(self._waiting)} of {world} learner ranks are here; missing: {named}"

    def notices(self, now: float) -> list[str]:
        """Which ranks are missing while others wait for long; empty else."""
        late = any(now - recruit.since >= NOTICE_S for recruit in self._waiting.values())
        return [self.missing()] if late else []

    def _named(self, rank: int) -> str:
        return f"{rank} (was on {self._homes[rank]})" if rank in self._homes else str(rank)

    def _holder(self, session: Session) -> Session | None:
        """Another process that has this number: one that waits, or one that is at work on another host.

        At work on the same host is the life before, which the server has not missed yet: a host runs one of each.
        """
        before = self._waiting.get(session.rank)
        if before is not None and not session.is_same_process(before.session):
            return before.session
        at_work = (s for s in self._roster.of("learner") if s.rank == session.rank and s.host != session.host)
        return next(at_work, None)

    def _take(self, recruit: Recruit) -> None:
        session = recruit.session
        self._waiting[session.rank] = recruit
        self._homes[session.rank] = session.host.partition("/")[0]
        if len(self._waiting) == session.world:
            meeting = self._waiting[0].store
            self._post.send_all((r.session for r in self._waiting.values()), "mustered", store=meeting)
            self._waiting.clear()

    def _refuse(self, session: Session, why: str) -> None:
        print(f"refused {session.name!r}: {why}", flush=True)
        self._post.send(session, "refused", reason=why, code="hello")

    def _other_group(self, recruit: Recruit) -> str:
        """What is wrong if those that wait belong to another kind of group; the settings do not tell all of it."""
        others = {other.kind for rank, other in self._waiting.items() if rank != recruit.session.rank} - {recruit.kind}
        if not others:
            return ""
        return (
            f"this rank belongs to a group of {recruit.kind}, those that wait to one of {others.pop()}: give all "
            "learner hosts the same --nnodes, learner.ranks, kind of device and version of torch"
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
