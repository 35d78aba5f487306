"""The processes of a run on this machine: started, looked after, replaced when they die, by one policy.

add ─► Member (name, command, present life) ─► tend ─► died? ─► note, "dead" to the server ─► next life, or given up
                                                └► a rank of the learner died inside torchrun: counted the same way
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from async_rl.launch.children import Child, end_all
from async_rl.launch.policy import Lives, is_forsaken, is_hopeless
from async_rl.launch.torchrun import RankFailures

_RANK_GRACE_S = 4.0


@dataclass(slots=True)
class Member:
    """One process by name, whichever life of it runs."""

    name: str
    role: str
    """``server``, ``learner``, ``actor``, ``reward``, ``reference`` or ``evaluator``."""
    command: Sequence[str]
    """Of the next life."""
    clients: tuple[str, ...]
    """Names under which the server knows it: the ranks of a learner."""
    child: Child | None = None
    lives: Lives = field(default_factory=Lives)
    ranks: RankFailures | None = None
    """What torchrun says, if it runs the process."""

    @property
    def is_alive(self) -> bool:
        """Whether a life of it runs."""
        return self.child is not None and self.child.poll() is None


class Crew:
    """All members.

    Args:
        logs: folder of their logs.
        env: environment of every process.
        gpus: ``CUDA_VISIBLE_DEVICES`` per name.
        note: where deaths and restarts are told.
        lost: called with the names of clients that are dead.
    """

    def __init__(
        self,
        logs: Path,
        env: Mapping[str, str],
        gpus: Mapping[str, str],
        note: Callable[[str], None],
        lost: Callable[[Iterable[str]], None],
    ) -> None:
        self._logs, self._env, self._gpus = logs, env, gpus
        self._note, self._lost = note, lost
        self.members: dict[str, Member] = {}
        self.children: list[Child] = []
        """Every life of everybody."""

    def add(self, name: str, role: str, command: Sequence[str], ranks: int = 1) -> Member:
        """Start a process that is looked after from now on.

        Args:
            name: unique; of its log, too.
            role: see :class:`Member`.
            command: what is run.
            ranks: of a learner.
        """
        clients = tuple(f"learner{rank}" for rank in range(ranks)) if role == "learner" else (name,)
        member = self.members[name] = Member(name, role, command, clients)
        self._start(member, torchrun=ranks > 1)
        return member

    def of(self, role: str) -> list[Member]:
        """Members of a role."""
        return [member for member in self.members.values() if member.role == role]

    def last_life(self, name: str) -> Child:
        """The newest life of a member, ended or not."""
        return next(child for child in reversed(self.children) if child.name == name)

    def tend(self, member: Member, has_died: Callable[[Child], bool], *, excused: bool = False) -> None:
        """Report a death, and begin the next life once it is due.

        Args:
            member: to look after.
            has_died: whether a child that has ended did so before its time.
            excused: whatever it says, it is not its fault: the server was away.
        """
        now = time.monotonic()
        if member.child is None:
            if member.lives.is_due(now):
                self._begin(member, now)
            return
        for failure in member.ranks.read() if member.ranks is not None and member.child.poll() is None else ():
            self._lost(member.clients)
            hopeless = not excused and is_hopeless(failure.exit_code, failure.said)
            again = member.lives.end(now, hopeless=hopeless, forsaken=is_forsaken(failure.exit_code))
            self._note(f"{member.name}: {failure.describe()}{_then(again, 0.0)}; {see(member.child)}")
            if not again:
                end_all([member.child], _RANK_GRACE_S)
                member.child = None
                return
            member.lives.begin()
        if has_died(member.child):
            self._bury(member, member.child, now, excused)

    def release(self, member: Member) -> None:
        """The run ends: torchrun is not to start ranks again that have left."""
        if member.child is not None and member.ranks is not None and member.ranks.read():
            member.child.signal(signal.SIGTERM)

    def praise(self, useful: Iterable[str]) -> None:
        """Lives of these names have worked."""
        names = set(useful)
        for member in self.members.values():
            if names.intersection(member.clients):
                member.lives.work()

    def owner(self, client: str) -> Member | None:
        """The living member behind a client's name; ``None`` if it is not of this host, or does not live."""
        return next((m for m in self.members.values() if client in m.clients and m.is_alive), None)

    def kill(self, member: Member, why: str) -> None:
        """End a life that is of no use any more; it is buried in its turn."""
        assert member.child is not None
        self._note(f"{member.name} {why}")
        member.child.signal(signal.SIGKILL)

    @property
    def restarts(self) -> dict[str, int]:
        """Restarts per name, where there were any."""
        return {member.name: member.lives.restarts for member in self.members.values() if member.lives.restarts}

    def _begin(self, member: Member, now: float) -> None:
        member.lives.begin()
        try:
            self._start(member, torchrun=member.ranks is not None)
        except OSError as error:  # no more processes or no memory just now
            again = member.lives.end(now)
            self._note(f"{member.name} cannot be started ({error.strerror}){_then(again, now, member.lives.next_at)}")

    def _start(self, member: Member, *, torchrun: bool) -> None:
        env = dict(self._env)
        if member.name in self._gpus:
            env["CUDA_VISIBLE_DEVICES"] = self._gpus[member.name]
        member.child = Child.start(member.name, member.command, self._logs / f"{member.name}.log", env)
        member.ranks = member.child.rank_failures() if torchrun else None
        self.children.append(member.child)

    def _bury(self, member: Member, child: Child, now: float, excused: bool) -> None:
        if member.role != "server":
            self._lost(member.clients)
        code = child.poll()
        assert code is not None
        if member.ranks is None:
            hopeless = is_hopeless(code, child.sentence())
        else:  # torchrun's own code says nothing; what its ranks said counts if they brought it down
            hopeless = any(is_hopeless(failure.exit_code, failure.said) for failure in member.ranks.read()[-1:])
        again = member.lives.end(now, hopeless=hopeless and not excused, forsaken=is_forsaken(code))
        member.child = None
        why = child.killed_rank() or child.cause()
        end = f"{child.describe_end()}{_then(again, now, member.lives.next_at)}"
        self._note(f"{member.name} {end}{f': {why}' if why else ''}; {see(child)}")


def see(child: Child) -> str:
    """Where to read more."""
    return f"see {child.log}"


def _then(again: bool, now: float, next_at: float | None = None) -> str:
    if not again:
        return " and is given up"
    wait_s = 0.0 if next_at is None else next_at - now
    return " and starts again" if wait_s < 1.5 else f" and starts again in {wait_s:.0f} s"
