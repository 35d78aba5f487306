"""The commands of a run on a cluster: each has a place and lives, is replaced when it dies, and actors come and go.

    begin ─► learner placed ─► Started: address ─► serve(address) ─► scorers, actors ─► scale(n) ... ─► end
               │ no place in time                     │ died, node lost: dead(name), another life in another place
               └► AsyncRLError: what was asked for    └► exit code 0: the run is over for it

| event                                    | what follows                                                        |
|------------------------------------------|---------------------------------------------------------------------|
| a command dies, its node is lost         | the server is told; a new place, a new life after 1, 2, 4 s, or given up |
| it said itself why, and never worked     | given up at once; without any actor or learner the run ends         |
| the learner dies                         | it is resumed in another life; workers move if its address is another one |
| no place for a learner that comes back   | workers leave theirs, and begin again when its server answers       |
| no place for learner or the least actors | an error when the deadline has passed, with what the cluster has free |
| no place for one more actor              | withdrawn; tried again after a while                                |
| no actor lives for a long time           | the run ends                                                        |

Pure but for the cluster that it is given: the clock is passed in, nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from async_rl.errors import AsyncRLError
from async_rl.launch.places import Cluster, Life, Lost, Tasks
from async_rl.launch.policy import Lives, is_hopeless
from async_rl.launch.ray_keeper import Ended, Started

PLACE_S = 120.0
"""The cluster finds a place within this time, or has none."""
YIELD_S = 10.0
"""A learner that has found no place for so long gets those of the workers, who can do nothing without it."""
RETRY_S = 300.0
"""After it had none for one more actor it is asked again."""
LEAVE_S = 20.0
"""An actor that is asked to leave does so in this time, or is ended."""
LONELY_S = 600.0
"""Without any actor for so long the run ends: nobody feeds the learner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRules:
    """What is wanted."""

    least: int
    """Actors at any time."""
    most: int
    """Actors at the busiest time."""
    learners: int
    """Learner hosts."""
    scorers: tuple[str, ...]
    """Role of each scorer."""
    learner_resources: Mapping[str, float]
    """Of a learner host, by Ray's names."""
    worker_resources: Mapping[str, float]
    """Of an actor or a scorer."""
    place_s: float = PLACE_S


@dataclass(slots=True)
class Member:
    """One command by name, whichever life of it runs."""

    name: str
    role: str
    """``learner``, ``actor``, ``reward`` or ``reference``."""
    index: int
    life: Life | None = None
    lives: Lives = field(default_factory=Lives)
    asked_at: float = 0.0
    """When its place was asked for."""
    address: str = ""
    """That its present life serves."""
    leaves_at: float | None = None
    """When it was asked to leave; ``None``: it was not."""
    moves: bool = False
    """It leaves for another address only."""


class Fleet:
    """All members.

    Args:
        cluster: gives places.
        tasks: makes commands.
        rules: what is wanted.
        prefix: of the names of actors and scorers, which are unique among all runs.
        note: told deaths, moves and waits.
        lost: told the name of a client that is dead.
    """

    def __init__(
        self,
        cluster: Cluster,
        tasks: Tasks,
        rules: FleetRules,
        prefix: str,
        note: Callable[[str], object],
        lost: Callable[[str], object],
    ) -> None:
        self._cluster, self._tasks, self.rules = cluster, tasks, rules
        self._prefix, self._note, self._lost = prefix, note, lost
        self.members: dict[str, Member] = {}
        self.address = ""
        """``HOST:PORT`` of the learner's present life; empty while it has none."""
        self.is_serving = False
        """Whether the server there has answered."""
        self.is_over = False
        """Nobody is replaced any more."""
        self.end: Ended | None = None
        """How the learner ended for good."""
        self._before = ""
        """Its last address."""
        self._had_least = False
        self._ceiling, self._ceiling_until = rules.most, -math.inf
        self._lonely_since: float | None = None

    def begin(self, now: float) -> None:
        """Ask for the learner's place; everybody else follows."""
        self._add("learner", "learner", 0, now)

    def serve(self, now: float) -> None:
        """The server answers: workers begin, and those of another address move."""
        self.is_serving = True
        for index, role in enumerate(self.rules.scorers):
            self._add(f"{self._prefix}.{role}{index}", role, index, now)
        for index in range(self.rules.least - len(self.actors())):
            self._add(f"{self._prefix}.actor{index}", "actor", index, now)
        for member in self._workers():
            if member.life is not None and member.address != self.address and not member.moves:
                self._note(f"{member.name} moves to {self.address}")
                member.moves = True
                self._ask_to_leave(member, now)

    def turn(self, now: float) -> None:
        """Take reports, replace what died, give up what finds no place.

        Raises:
            AsyncRLError: the run cannot go on.
        """
        for member in list(self.members.values()):
            if member.life is None:
                if member.lives.is_due(now) and self._may_begin(member):
                    member.lives.begin()
                    self._begin(member, now)
                continue
            report = member.life.poll()
            if isinstance(report, Started):
                self._has_started(member, report, now)
            elif report is not None:
                self._bury(member, report, now)
            elif not member.life.is_placed and now - member.asked_at > self.rules.place_s:
                self._find_no_room(member, now)
            elif member.name == "learner" and not member.life.is_placed and now - member.asked_at > YIELD_S:
                self._make_room()
            elif member.leaves_at is not None and now - member.leaves_at > LEAVE_S:
                self._bury(member, Lost(why=f"did not leave within {LEAVE_S:.0f} s", hopeless=False), now)
        self._look_for_actors(now)

    def scale(self, aim: int, now: float) -> None:
        """Have so many actors, from now on."""
        here = sorted(self.actors(), key=lambda member: member.index)
        if aim != len(here):
            self._note(f"actors: {len(here)} ─► {aim}")
        taken = {member.index for member in self.members.values() if member.role == "actor"}
        free = (i for i in range(len(taken) + aim) if i not in taken)
        for _ in range(aim - len(here)):
            index = next(free)
            self._add(f"{self._prefix}.actor{index}", "actor", index, now)
        for member in here[aim:]:
            self._ask_to_leave(member, now)

    def most(self, now: float) -> int:
        """Most actors for which the cluster is known to have no lack of room."""
        return self.rules.most if now >= self._ceiling_until else self._ceiling

    def actors(self) -> list[Member]:
        """Actors that are wanted: neither leaving nor given up."""
        return [m for m in self.members.values() if m.role == "actor" and self._is_wanted(m)]

    def praise(self, names: Collection[str]) -> None:
        """Lives of these clients have worked."""
        for member in self.members.values():
            if member.name in names or (member.role == "learner" and "learner0" in names):
                member.lives.work()

    def stop(self) -> None:
        """The run is to wind down: the learner is asked as by Ctrl-C, and nobody is replaced."""
        self.is_over = True
        learner = self.members["learner"]  # its server tells the others
        if learner.life is not None and learner.life.is_placed:
            learner.life.stop()
        elif self.end is None:
            self._free(learner)
            self.end = Ended(exit_code=1, sentence=None, told="was not running")

    def dismiss(self) -> bool:
        """The run is over: take reports of those that leave; whether all have."""
        for member in self.members.values():
            life = member.life
            if life is not None and (not life.is_placed or isinstance(life.poll(), Ended | Lost)):
                self._free(member)
        return all(member.life is None for member in self.members.values())

    def close(self) -> None:
        """End everybody and give all places back."""
        for member in self.members.values():
            self._free(member)

    # ------------------------------------------------------------------ lives

    def _add(self, name: str, role: str, index: int, now: float) -> None:
        if name not in self.members:
            self.members[name] = Member(name, role, index)
            self._begin(self.members[name], now)

    def _begin(self, member: Member, now: float) -> None:
        is_learner = member.role == "learner"
        member.address = "" if is_learner and member.index == 0 else self.address
        member.asked_at, member.leaves_at, member.moves = now, None, False
        if is_learner:
            task = self._tasks.learner(member.index, member.address or self._before)
        else:
            task = self._tasks.worker(member.name, member.role, member.address)
        rules = self.rules
        member.life = self._cluster.begin(task, rules.learner_resources if is_learner else rules.worker_resources)

    def _may_begin(self, member: Member) -> bool:
        if self.is_over:
            return False
        return self.is_serving or (member.role == "learner" and (member.index == 0 or self.address != ""))

    def _has_started(self, member: Member, report: Started, now: float) -> None:
        if member.role != "learner" or member.index:
            return
        self.address = self._before = member.address = report.address
        self._note(f"the learner runs on {report.host}; its server listens at {report.address}")
        for index in range(1, self.rules.learners):
            self._add(f"learner{index}", "learner", index, now)

    def _bury(self, member: Member, report: Ended | Lost, now: float) -> None:
        """A life is over; what that means depends on who it was."""
        leaves, moves = member.leaves_at is not None, member.moves
        self._free(member)
        if member.role != "learner":
            self._lost(member.name)
        elif member.index == 0:
            self.address, self.is_serving = "", False
        if moves and not self.is_over:
            member.lives.next_at = now  # as soon as the server answers
        elif leaves or (isinstance(report, Ended) and report.exit_code == 0 and member.name != "learner"):
            del self.members[member.name]
        elif member.name == "learner" and isinstance(report, Ended) and (report.exit_code == 0 or self.is_over):
            self.end, self.is_over = report, True
        elif not self.is_over:
            self._mourn(member, report, now)
        elif member.name == "learner":
            raise AsyncRLError(f"the learner is gone before its last checkpoint: {_told(report)}")

    def _mourn(self, member: Member, report: Ended | Lost, now: float) -> None:
        """It died before its time."""
        if isinstance(report, Lost):
            hopeless = report.hopeless
        else:  # a worker that cannot reach a server which is away, or was a moment ago, says so and is not to blame
            excused = member.role != "learner" and (member.lives.has_worked or not self.is_serving)
            hopeless = not excused and is_hopeless(report.exit_code, report.sentence)
        again = member.lives.end(now, hopeless=hopeless)
        told = _told(report)
        self._note(f"{member.name}: {told.partition(chr(10))[0]}; {'starts again' if again else 'is given up'}")
        if again:
            return
        same = [m for m in self.members.values() if m.role == member.role]
        if member.role == "learner" or all(m.lives.given_up for m in same):
            raise AsyncRLError(f"{member.name} is given up, and no other {member.role} is left: {told}")

    def _free(self, member: Member) -> None:
        if member.life is not None:
            member.life.remove()
            member.life = None

    def _ask_to_leave(self, member: Member, now: float) -> None:
        member.leaves_at = now
        if member.life is None or not member.life.is_placed:
            self._free(member)
            if member.moves:
                member.lives.next_at = now
            else:
                del self.members[member.name]
        else:
            member.life.stop()

    # ------------------------------------------------------------------ room

    def _find_no_room(self, member: Member, now: float) -> None:
        rules = self.rules
        is_learner = member.role == "learner"
        resources = rules.learner_resources if is_learner else rules.worker_resources
        asked = ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())
        why = f"no place for {member.name} ({asked}) within {rules.place_s:.0f} s: {self._cluster.room()}"
        if member.role == "actor" and len(self.actors()) > rules.least:
            self._ask_to_leave(member, now)
            self._ceiling, self._ceiling_until = len(self.actors()), now + RETRY_S
            self._note(f"{why}; going on with {self._ceiling} actors")
        elif is_learner or not self._had_least:
            raise AsyncRLError(
                f"{why}; free some, add nodes, or ask for less (--{'learner' if is_learner else 'actor'}-gpus, "
                f"--{'learner' if is_learner else 'actor'}-cpus, --min-actors)"
            )
        else:
            self._note(f"{why}; waiting for it")
            member.asked_at = now

    def _make_room(self) -> None:
        """Workers give their places to the learner, and come back when its server answers."""
        for member in self._workers():
            if member.life is not None:
                self._note(f"{member.name} makes room for the learner")
                self._free(member)
                member.lives.next_at = member.asked_at

    def _look_for_actors(self, now: float) -> None:
        """Notice when the least number has been reached once, and when nobody is left."""
        placed = [m for m in self.actors() if m.life is not None and m.life.is_placed]
        self._had_least = self._had_least or (self.is_serving and len(placed) >= self.rules.least)
        if placed or not self.is_serving or self.is_over:
            self._lonely_since = None
        elif self._lonely_since is None:
            self._lonely_since = now
        elif now - self._lonely_since > LONELY_S:
            raise AsyncRLError(f"no actor has lived for {LONELY_S / 60:.0f} minutes: {self._cluster.room()}")

    def _workers(self) -> list[Member]:
        return [member for member in self.members.values() if member.role != "learner"]

    def _is_wanted(self, member: Member) -> bool:
        return (member.leaves_at is None or member.moves) and not member.lives.given_up


def _told(report: Ended | Lost) -> str:
    return report.told if isinstance(report, Ended) else report.why
