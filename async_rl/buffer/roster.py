"""Who is connected, and what each client said last.

hello ─► Session ─ heard, beats, live ─► ... ─► bye | silent | dead | replaced ─► kept for the final account
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from async_rl.buffer.fields import take
from async_rl.protocol import Role
from async_rl.timer import WORK, utilization
from async_rl.wire import Header

_MOST_CREDIT = 1 << 20


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
    fenced: bool = False
    """Too late with an announced version: no tickets until it has caught up."""
    worked: bool = False
    """It got tickets, if only none, and has not said ``asleep`` since: it may use the device (actors, colocated)."""
    asleep: bool = False
    """It gave its device back and was told of no version since (actors, colocated)."""
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
    in_flight: int = 0
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
            pid=take(hello, "pid", int, 0),
            host=take(hello, "host", str, ""),
            heard=now,
            seq=take(hello, "seq", int, 0),
        )

    def is_same_process(self, other: Session) -> bool:
        """Whether both are connections of one process."""
        return (self.pid, self.host) == (other.pid, other.host)

    def take_credit(self, header: Header) -> None:
        """It can take ``count`` more, of which some may be on their way: those that it had not ``received`` yet.

        Raises:
            WireError: ``bad_field``.
        """
        count, received = take(header, "count", int), take(header, "received", int, self.tickets)
        under_way = max(0, self.tickets - max(0, received))
        self.credit = max(0, min(count, _MOST_CREDIT) - under_way)

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
            "fenced": self.fenced,
            "in_flight": self.in_flight,
            "gaps": self.gaps,
            "info": self.info,
            "cpu_s": round(self.cpu_s, 3),
            "rss_bytes": int(self.rss_bytes),
            "utilization": utilization(self.seconds) if any(s in WORK for s in self.seconds) else None,
        }


class Roster:
    """Sessions by identity while connected, by name for good."""

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
        self._named[session.name] = session

    def leave(self, session: Session, why: str) -> None:
        """No longer connected; its account stays."""
        session.gone = why
        session.credit = 0
        self._connected.pop(session.identity, None)

    def utilization(self, role: Role) -> float | None:
        """Mean utilisation of a role over the last interval."""
        shares = [share for s in self.of(role) if (share := s.measure()) is not None]
        return sum(shares) / len(shares) if shares else None

    def steps_per_s(self) -> float | None:
        """Steps of environments that all actors make per second of their work; None where none has told."""
        rates = [s.steps_per_s for s in self.of("actor") if s.steps_per_s is not None]
        return sum(rates) if rates else None

    def to_plain(self) -> list[dict[str, Any]]:
        """Every client that ever was, the last of each name."""
        return [s.to_plain() for s in self._named.values()]
