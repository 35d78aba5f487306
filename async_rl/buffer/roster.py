"""Who is connected, and what each client said last.

hello ─► Session ─ heard, beats, live ─► ... ─► bye | silent | dead | replaced ─► kept for the final account
a restart of the server: to_note ─► restore ─► AWAY, until it says hello again
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from async_rl.buffer.fields import take
from async_rl.protocol import Role
from async_rl.timer import WORK, utilization
from async_rl.weights.pull import COUNTED
from async_rl.wire import Header

AWAY = "away"
"""Why a client is gone that was connected when the server died, and has not said hello again."""
_MOST_CREDIT = 1 << 20
_MOST_GONE = 1024
"""So many clients that have left are kept for the account; a stream of new names is not kept for good."""
_MOST_SHOWN = 256
"""Clients in an account: with thousands, writing it would be what the server mostly does."""
_NOTED_GONE, _NOTED = 64, 256
"""So many of those that have left, and of those that are connected, are known after a restart of the server."""
_REMEMBERED = 4096
"""Names that are known; beyond it those that left first are forgotten."""


@dataclass(slots=True, kw_only=True)
class Session:
    """One client."""

    identity: bytes
    """Its address on the ROUTER."""
    name: str
    role: Role
    rank: int
    world: int
    pid: int
    host: str
    heard: float
    """Time of its last message."""
    seq: int
    """Number of its last message."""
    gaps: int = 0
    """Messages that never came."""
    gone: str = ""
    """Why it is no longer connected; empty while it is."""
    stage: str = ""
    """What it adds to groups (scorers)."""
    life: int = 0
    """Processes that had its name before it."""
    credit: int = 0
    """Tickets, or groups, that it can take now (actors, scorers)."""
    tickets: int = 0
    """Tickets, or groups, sent to it."""
    live: int = -1
    """Version that it holds, proven by checksum; -1: none (actors, evaluators)."""
    relay: str = ""
    """Where other hosts may pull weights from it (actors); empty: nowhere."""
    relay_key: str = ""
    """Public key of its process; empty: it has none."""
    received: dict[str, float] = field(default_factory=dict)
    """Weights that it had received over the network by its last ``live``, by :data:`async_rl.weights.pull.COUNTED`."""
    devices: tuple[str, ...] = ()
    """Of its workers, which can take part in broadcasts of weights (actors); empty: it cannot."""
    fenced: bool = False
    """Too late with an announced version: no tickets until it has caught up."""
    worked: bool = False
    """It got tickets, if only none, and has not said ``asleep`` since: it may use the device (actors, colocated)."""
    useful: bool = False
    """Its process has done what it is there for: an accepted group, an annotation, an evaluation, a trained step."""
    asleep: bool = False
    """It gave its device back and was told of no version since (actors, colocated)."""
    group: str = ""
    """Life of the learner group that it belongs to (learners)."""
    wants: int = -1
    """Step that it waits for (learners); -1: none."""
    state: str = "starting"
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds per state, cumulative, from its timer."""
    marks: dict[str, float] = field(default_factory=dict)
    """The same at the last step."""
    share: float | None = None
    """Utilisation over the last interval that was measured."""
    steps_per_s: float | None = None
    """Steps of environments per second of generating, between its last two beats (actors of a control run)."""
    cpu_s: float = 0.0
    rss_bytes: float = 0.0
    held: frozenset[tuple[int, int]] | None = None
    """Ordinals and attempts that it has, by its last beat; ``None``: it did not say."""
    rejoined: bool = False
    """It came back after a restart of the server, which does not know what it was doing."""
    info: dict[str, float] = field(default_factory=dict)
    """Counters of its own."""

    @classmethod
    def from_hello(cls, identity: bytes, hello: Header, now: float) -> Session:
        """A client that is let in.

        Raises:
            WireError: a field is missing or of the wrong type.
        """
        return cls(
            identity=identity,
            name=take(hello, "name", str),
            role=hello["role"],
            rank=take(hello, "rank", int, 0),
            world=take(hello, "world", int, 1),
            stage=take(hello, "stage", str, ""),
            group=take(hello, "group", str, ""),
            pid=take(hello, "pid", int, 0),
            host=take(hello, "host", str, ""),
            heard=now,
            seq=take(hello, "seq", int, 0),
        )

    def is_same_process(self, other: Session) -> bool:
        """Whether both are connections of one process."""
        return self.is_process(other.pid, other.host)

    def is_process(self, pid: object, host: object) -> bool:
        """Whether it is a connection of this process."""
        return (self.pid, self.host) == (pid, host)

    def take_over(self, before: Session) -> None:
        """The last session of its name: the same process keeps what it has shown, another one is its next life."""
        if self.is_same_process(before):  # its connection broke, its device did not change
            self.worked, self.useful, self.asleep = before.worked, before.useful, before.asleep
            self.rejoined = before.gone == AWAY
            self.received = before.received
        self.life = before.life + (not self.is_same_process(before))

    def take_credit(self, header: Header) -> None:
        """It can take ``count`` more, of which some may be on their way: those that it had not ``received`` yet.

        Raises:
            WireError: ``bad_field``.
        """
        count, received = take(header, "count", int), take(header, "received", int, self.tickets)
        under_way = max(0, self.tickets - max(0, received))
        self.credit = max(0, min(count, _MOST_CREDIT) - under_way)

    def take_received(self, told: dict[str, float]) -> dict[str, float]:
        """What it has received since the last call, of all that its process has; after a restart of the server: all."""
        before, self.received = self.received, self.received | told
        return {name: max(0.0, told.get(name, 0.0) - before.get(name, 0.0)) for name in COUNTED}

    def measure(self) -> float | None:
        """Utilisation since the last call that saw new seconds; ``None`` before anything but start-up was measured."""
        delta = {k: v - self.marks.get(k, 0.0) for k, v in self.seconds.items()}
        if sum(v for k, v in delta.items() if k != "starting") > 0:
            self.share = utilization(delta)
            self.marks = dict(self.seconds)
        return self.share

    def report(self, seconds: dict[str, float], info: dict[str, float]) -> None:
        """What a beat says of its work: seconds per state and counters, both cumulative."""
        worked_s = seconds.get("generating", 0.0) - self.seconds.get("generating", 0.0)
        made = info.get("env_steps", 0.0) - self.info.get("env_steps", 0.0)
        if worked_s > 0 and made > 0:
            self.steps_per_s = made / worked_s
        self.seconds, self.info = seconds or self.seconds, info

    def to_plain(self) -> dict[str, Any]:
        """For ``books.json`` and ``status``."""
        return {
            "name": self.name,
            "role": self.role,
            "stage": self.stage,
            "state": self.gone or self.state,
            "connected": not self.gone,
            "host": self.host,
            "pid": self.pid,
            "live": self.live,
            "relay": self.relay,
            "fenced": self.fenced,
            "in_flight": len(self.held or ()),
            "gaps": self.gaps,
            "info": self.info,
            "cpu_s": round(self.cpu_s, 3),
            "rss_bytes": int(self.rss_bytes),
            "seconds": self.seconds,
            "utilization": utilization(self.seconds) if any(s in WORK for s in self.seconds) else None,
        }


class Roster:
    """Sessions by identity while connected, by name for good, or until a thousand others have left."""

    def __init__(self) -> None:
        self._connected: dict[bytes, Session] = {}
        self._named: dict[str, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        """Connected sessions, in order of arrival; safe against changes meanwhile."""
        return iter(list(self._connected.values()))

    def find(self, identity: bytes) -> Session | None:
        """Whose messages come from ``identity``."""
        return self._connected.get(identity)

    def named(self, name: str) -> Session | None:
        """The connected session of that name."""
        session = self._named.get(name)
        return session if session is not None and not session.gone else None

    def last(self, name: str) -> Session | None:
        """The newest session of that name, connected or not."""
        return self._named.get(name)

    def of(self, *roles: Role) -> list[Session]:
        """Connected sessions of these roles."""
        return [s for s in self._connected.values() if s.role in roles]

    def join(self, session: Session) -> None:
        """Add a session; the caller has let go of the previous one of that name."""
        self._connected[session.identity] = session
        self._named.pop(session.name, None)
        self._named[session.name] = session
        if len(self._named) > _REMEMBERED:
            first_gone = next((s.name for s in self._named.values() if s.gone), None)
            if first_gone is not None:
                del self._named[first_gone]

    def leave(self, session: Session, why: str) -> None:
        """No longer connected; its account stays."""
        session.gone = why
        session.credit = 0
        if self._connected.pop(session.identity, None) is not None:
            self._named[session.name] = self._named.pop(session.name)  # to the end: in the order of leaving
            self._forget()

    def silent(self) -> list[str]:
        """Names that were let go because nothing was heard of them, and that have not come back."""
        return [s.name for s in self._named.values() if s.gone == "silent" and s.role != "monitor"]

    def away(self) -> list[Session]:
        """Those that were connected when the server died, and have not said hello again."""
        return [s for s in self._named.values() if s.gone == AWAY]

    def excuse(self, now: float) -> None:
        """Nobody could be heard: silence counts from now."""
        for session in self._connected.values():
            session.heard = now

    def to_note(self) -> list[list[Any]]:
        """What a restarted server must know of its clients, as plain types."""
        gone = [s for s in self._named.values() if s.gone and s.gone != AWAY][-_NOTED_GONE:]
        known = gone + [*self.away(), *self._connected.values()][-_NOTED:]
        return [[s.name, s.role, s.stage, s.rank, s.pid, s.host, s.life, s.gone] for s in known]

    def restore(self, note: Iterable[Sequence[Any]], now: float) -> None:
        """Those that were connected are expected back.

        Raises:
            TypeError, ValueError: it is no note.
        """
        for name, role, stage, rank, pid, host, life, gone in note:
            self._named[name] = Session(
                identity=b"",
                name=name,
                role=role,
                stage=stage,
                rank=rank,
                world=1,
                pid=pid,
                host=host,
                heard=now,
                seq=0,
                life=life,
                gone=gone or AWAY,
            )

    def _forget(self) -> None:
        """Forget the first half of those that have left, when they are twice as many as are kept."""
        if len(self._named) - len(self._connected) >= 2 * _MOST_GONE:
            gone = (name for name, s in self._named.items() if s.gone and s.gone != AWAY)
            for name in list(islice(gone, _MOST_GONE)):
                del self._named[name]

    def utilization(self, role: Role) -> float | None:
        """Mean utilisation of a role over the last interval."""
        shares = [share for s in self.of(role) if (share := s.measure()) is not None]
        return sum(shares) / len(shares) if shares else None

    def steps_per_s(self) -> float | None:
        """Steps of environments that all actors make per second of their work; None where none has told."""
        rates = [s.steps_per_s for s in self.of("actor") if s.steps_per_s is not None]
        return sum(rates) if rates else None

    def to_plain(self) -> list[dict[str, Any]]:
        """Clients that are connected, those that came first, then those that left last; some hundreds at most."""
        gone = islice((s for s in reversed(self._named.values()) if s.gone), _MOST_SHOWN)
        return [*self.glance(), *(s.to_plain() for s in gone)]

    def glance(self) -> list[dict[str, Any]]:
        """The connected ones of them."""
        return [s.to_plain() for s in islice(self._connected.values(), _MOST_SHOWN)]
