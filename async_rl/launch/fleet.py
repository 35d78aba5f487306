"""The commands of a run on a cluster: each has a place and lives, is replaced when it dies, and actors come and go.

    begin ─► learner placed ─► Started: address ─► serve ─► scorers, actors ─► scale(n) ... ─► end
               │ no place in time                     │ died, node lost: dead(name), another life in another place
               └► AsyncRLError: what was asked for    └► exit code 0: the run is over for it

| event                                    | what follows                                                        |
|------------------------------------------|---------------------------------------------------------------------|
| a command dies, its node is lost         | the server is told; a new place, a new life after 1, 2, 4 s, or given up |
| it said itself why, and never worked     | given up at once; without any actor or learner the run ends         |
| an actor is given up                     | the others go on; another one is tried after a while                |
| the learner dies                         | it is resumed in another life; all follow if its address is another one |
| no place for a learner that comes back   | workers leave theirs, and begin again when its server answers       |
| no place for learner or the least actors | an error when the deadline has passed, with what the cluster has free |
| no place for one more actor              | withdrawn; tried again after a while                                |
| no actor lives for a long time           | the run ends                                                        |

Pure but for the cluster that it is given: the clock is passed in, nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from async_rl.errors import AsyncRLError
from async_rl.launch.fleet_member import FleetMember
from async_rl.launch.fleet_rules import FleetRules
from async_rl.launch.places import Cluster, Ended, Life, Lost, Started
from async_rl.launch.policy import is_hopeless
from async_rl.launch.ray_tasks import RayTasks

YIELD_S = 10.0
"""A learner that has found no place for so long gets those of the workers, who can do nothing without it."""
RETRY_S = 300.0
"""After an actor was given up, or found no place, the cluster is asked again for one more."""
LEAVE_S = 20.0
"""An actor that is asked to leave does so in this time, or is ended."""
LONELY_S = 600.0
"""Without any actor for so long the run ends: nobody feeds the learner."""


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
        tasks: RayTasks,
        rules: FleetRules,
        prefix: str,
        note: Callable[[str], object],
        lost: Callable[[str], object],
    ) -> None:
        self._cluster, self._tasks, self.rules = cluster, tasks, rules
        self._prefix, self._note, self._lost = prefix, note, lost
        self._learner = FleetMember("learner", "learner", 0)
        self.members = {"learner": self._learner}
        self.address = ""
        """``HOST:PORT`` of the learner's present life; empty while it has none."""
        self.is_serving = False
        """Whether the server there has answered."""
        self.is_over = False
        """Nobody is replaced any more."""
        self.end: Ended | None = None
        """How the learner ended for good."""
        self._had_least = False
        self._ceiling, self._ceiling_until = rules.most, -math.inf
        self._lonely_since: float | None = None

    def begin(self, now: float) -> None:
        """Ask for the learner's place; everybody else follows."""
        self._begin(self._learner, now)

    def serve(self, now: float) -> None:
        """The server answers: workers begin."""
        self.is_serving = True
        for index, role in enumerate(self.rules.scorers):
            self._add(f"{self._prefix}.{role}{index}", role, index, now)
        for index in range(self.rules.least - len(self.actors())):
            self._add(f"{self._prefix}.actor{index}", "actor", index, now)

    def turn(self, now: float) -> None:
        """Take reports, replace what died, give up what finds no place.

        Raises:
            AsyncRLError: the run cannot go on.
        """
        for member in list(self.members.values()):
            if member.life is not None:
                self._look_at(member, member.life, now)
            elif member.lives.is_due(now) and self._may_begin(member):
                member.lives.begin()
                self._begin(member, now)
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
        """Most actors of which the cluster is not known to have no room, or to let them die."""
        return self.rules.most if now >= self._ceiling_until else max(self._ceiling, len(self.actors()))

    def actors(self) -> list[FleetMember]:
        """Actors that are wanted: neither leaving nor given up."""
        members = self.members.values()
        return [m for m in members if m.role == "actor" and m.leaves_at is None and not m.lives.given_up]

    def praise(self, names: Collection[str]) -> None:
        """Lives of these clients have worked."""
        for member in self.members.values():
            if member.name in names or (member.role == "learner" and "learner0" in names):
                member.lives.work()

    def end_silent(self, name: str, told: str, now: float) -> None:
        """A worker lives but does not move: another life is better. Learner hosts look after their own."""
        member = self.members.get(name)
        if member is not None and member.is_placed and member.role != "learner":
            self._bury(member, Lost(told=told), now)

    def stop(self) -> None:
        """The run is to wind down: the learner is asked as by Ctrl-C, and nobody is replaced."""
        self.is_over = True  # the learner's server tells the others
        learner = self._learner
        if learner.life is not None and learner.is_placed:
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
            self.members[name] = FleetMember(name, role, index)
            self._begin(self.members[name], now)

    def _begin(self, member: FleetMember, now: float) -> None:
        member.asked_at, member.leaves_at = now, None
        if member.role == "learner":  # the first gets its last port again, the others its address
            task = self._tasks.learner(member.index, self._learner.address)
        else:
            task = self._tasks.worker(member.name, member.role, self.address)
        member.address = self._learner.address
        member.life = self._cluster.begin(task, self._resources(member))

    def _again(self, member: FleetMember, now: float) -> None:
        """Another life, as soon as it may begin, unless it was to leave anyway."""
        self._free(member)
        if member.leaves_at is None:
            member.lives.next_at = now
        else:
            del self.members[member.name]

    def _may_begin(self, member: FleetMember) -> bool:
        if self.is_over:
            return False
        return self.is_serving or member.is_first or (member.role == "learner" and self.address != "")

    def _look_at(self, member: FleetMember, life: Life, now: float) -> None:
        report, waits_s = life.poll(), now - member.asked_at
        if isinstance(report, Started):
            if member.is_first:
                self._follow(report, now)
        elif report is not None:
            self._bury(member, report, now)
        elif not life.is_placed and waits_s > self.rules.place_s:
            self._find_no_room(member, now)
        elif not life.is_placed and waits_s > YIELD_S and member.is_first:
            self._make_room()
        elif member.leaves_at is not None and now - member.leaves_at > LEAVE_S:
            self._bury(member, Lost(told=f"did not leave within {LEAVE_S:.0f} s"), now)

    def _follow(self, report: Started, now: float) -> None:
        """The first learner host runs: the others join it, and all that serve another address move."""
        self.address = self._learner.address = report.address
        self._note(f"the learner runs on {report.host}; its server listens at {report.address}")
        for member in list(self.members.values()):
            if member.life is not None and member.address != report.address and not member.is_first:
                self._note(f"{member.name} moves to {report.address}")
                self._again(member, now)
        for index in range(1, self.rules.learners):
            self._add(f"learner{index}", "learner", index, now)

    def _bury(self, member: FleetMember, report: Ended | Lost, now: float) -> None:
        """A life is over; what that means depends on who it was."""
        self._free(member)
        if member.role != "learner":
            self._lost(member.name)
        elif member.is_first:
            self.address, self.is_serving = "", False
        is_well = isinstance(report, Ended) and report.exit_code == 0
        if member.leaves_at is not None or (is_well and not member.is_first):
            del self.members[member.name]
        elif member.is_first and isinstance(report, Ended) and (is_well or self.is_over):
            self.end, self.is_over = report, True
        elif not self.is_over:
            self._mourn(member, report, now)
        elif member.is_first:
            raise AsyncRLError(f"the learner is gone before its last checkpoint: {report.told}")

    def _mourn(self, member: FleetMember, report: Ended | Lost, now: float) -> None:
        """It died before its time."""
        if isinstance(report, Lost):
            hopeless = report.hopeless
        else:  # who cannot reach a server which is away, or was a moment ago, says so and is not to blame
            excused = not member.is_first and (member.lives.has_worked or not self.is_serving)
            hopeless = not excused and is_hopeless(report.exit_code, report.sentence)
        again = member.lives.end(now, hopeless=hopeless)
        self._note(f"{member.name}: {report.told.partition(chr(10))[0]}; {'starts again' if again else 'is given up'}")
        if again:
            return
        same = [m for m in self.members.values() if m.role == member.role]
        if member.role == "learner" or all(m.lives.given_up for m in same):
            raise AsyncRLError(f"{member.name} is given up, and no other {member.role} is left: {report.told}")
        if member.role == "actor":
            self._limit(now)

    def _free(self, member: FleetMember) -> None:
        if member.life is not None:
            member.life.remove()
            member.life = None

    def _ask_to_leave(self, member: FleetMember, now: float) -> None:
        member.leaves_at = now
        if member.life is not None and member.is_placed:
            member.life.stop()
        else:
            self._free(member)
            del self.members[member.name]

    # ------------------------------------------------------------------ room

    def _resources(self, member: FleetMember) -> dict[str, float]:
        return dict(self.rules.learner if member.role == "learner" else self.rules.worker)

    def _find_no_room(self, member: FleetMember, now: float) -> None:
        asked = ", ".join(f"{amount:g} {kind}" for kind, amount in self._resources(member).items())
        why = f"no place for {member.name} ({asked}) within {self.rules.place_s:.0f} s: {self._cluster.room()}"
        if member.role == "actor" and len(self.actors()) > self.rules.least:
            self._ask_to_leave(member, now)
            self._limit(now)
            self._note(f"{why}; going on with {self._ceiling} actors")
        elif member.role == "learner" or not self._had_least:
            kind = "learner" if member.role == "learner" else "actor"
            raise AsyncRLError(
                f"{why}; free some, add nodes, or ask for less (--{kind}-gpus, --{kind}-cpus, --min-actors)"
            )
        else:
            self._note(f"{why}; waiting for it")
            member.asked_at = now

    def _limit(self, now: float) -> None:
        """No more actors than there are for a while."""
        self._ceiling, self._ceiling_until = len(self.actors()), now + RETRY_S

    def _make_room(self) -> None:
        """Workers give their places to the learner, and come back when its server answers."""
        for member in list(self.members.values()):
            if member.life is not None and member.role != "learner":
                self._note(f"{member.name} makes room for the learner")
                self._again(member, member.asked_at)

    def _look_for_actors(self, now: float) -> None:
        """Notice when the least number has been reached once, and when nobody is left."""
        placed = [m for m in self.actors() if m.is_placed]
        self._had_least = self._had_least or (self.is_serving and len(placed) >= self.rules.least)
        if placed or not self.is_serving or self.is_over:
            self._lonely_since = None
        elif self._lonely_since is None:
            self._lonely_since = now
        elif now - self._lonely_since > LONELY_S:
            raise AsyncRLError(f"no actor has lived for {LONELY_S / 60:.0f} minutes: {self._cluster.room()}")
