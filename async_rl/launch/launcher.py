"""Starts the processes of a run, watches them, ends them: after it returns none is left, whatever happened.

    server ──server.json──► launcher ──address──► learner group, actors, scorers, evaluator
       ▲ └─ status, stop ─► line ─► display
       └─── dead, stop, fatal          crew: the processes     policy: another life?     ending: the verdict

| event                             | what follows                                                                   |
|-----------------------------------|--------------------------------------------------------------------------------|
| a process dies                    | reported to the server, started again after 1, 2, 4 s, then given up;          |
|                                   | once a life has worked, this begins anew                                       |
| the server dies                   | the same, with ``--recover``: same address, same run                           |
| a rank of several dies            | torchrun starts the group again; counted here                                  |
| a process said itself why         | given up at once: another life would end the same way                          |
| a process is frozen               | ended and started again after some heartbeat periods without a word            |
| server, learner or the last of a  | the run fails with the end of its log                                          |
| needed role is given up           |                                                                                |
| the server says stop              | every process has a bounded time to leave                                      |
| Ctrl-C, SIGTERM, a lost terminal  | the server is asked to stop: the learner writes a checkpoint; code 130, 143, 129 |
| the same again                    | everything is killed at once                                                   |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from async_rl.errors import AsyncRLError, DeadlineError
from async_rl.launch import ending
from async_rl.launch.children import Child, become_subreaper, end_all, end_descendants, wait_all
from async_rl.launch.commands import Commands
from async_rl.launch.crew import Crew, Member
from async_rl.launch.interfaces import Display, Monitor, Outcome, Status
from async_rl.launch.interrupts import Interrupts
from async_rl.launch.line import REOPEN_S, Line
from async_rl.launch.server_keeper import ServerKeeper
from async_rl.launch.silence import Silence, longest_server_silence_s, longest_silence_s
from async_rl.runfolder import read_json

CONNECT_S = 30.0
WIND_DOWN_S = 300.0
"""Time for the last checkpoint and evaluation after a stop."""
FAILED_S = 10.0
"""Time to leave after an error."""
_TURN_S = 0.2
_NEEDED = {"actor": "actor", "reward": "reward scorer", "reference": "reference scorer"}
"""Roles without which a run cannot go on, as messages name them."""

Verdict = tuple[Status, str]


@dataclass(slots=True)
class Launcher:
    """One run on this machine. Use it once, from the main thread.

    Args:
        commands: how each process is started.
        env: environment of every process.
        gpus: ``CUDA_VISIBLE_DEVICES`` per process name.
        actors: how many actors are started here; 0 when they connect from other hosts.
        evaluates: whether the evaluator is started here.
        scorers: how many scorers of each stage are started here.
        monitor: makes the line to the server at an address.
        cleanup: frees what a killed process may have left, given the run id.
        heartbeat_s: period within which a silent client is noticed.
        spare: process ids below this one that are not of the run.
    """

    commands: Commands
    env: Mapping[str, str]
    gpus: Mapping[str, str]
    actors: int
    display: Display
    interrupts: Interrupts
    monitor: Callable[[str], Monitor]
    cleanup: Callable[[str], object]
    scorers: Mapping[str, int] = field(default_factory=dict)
    evaluates: bool = True
    heartbeat_s: float = 5.0
    spare: Collection[int] = ()
    _crew: Crew = field(init=False)
    _silence: Silence = field(init=False)
    _keeper: ServerKeeper = field(init=False)
    _line: Line | None = field(init=False, default=None)
    _stop: Mapping[str, Any] | None = field(init=False, default=None)
    """What the server said when it ended the run."""
    _asked: bool = field(init=False, default=False)
    """Whether the server was asked to stop."""
    _deadline: float | None = field(init=False, default=None)
    """When the run must have wound down."""

    def __post_init__(self) -> None:
        out = self.commands.out
        self._crew = Crew(out / "logs", self.env, self.gpus, lambda text: self.display.note(text), self._lost)
        self._silence = Silence(longest_silence_s(self.heartbeat_s))
        self._keeper = ServerKeeper(self._crew, self.commands, longest_server_silence_s(self.heartbeat_s))

    @property
    def children(self) -> list[Child]:
        """Every process that was started, in order."""
        return self._crew.children

    def run(self) -> Outcome:
        """Start everything and stay until the end."""
        become_subreaper()
        began = time.monotonic()
        try:
            if before := str(read_json(self.commands.out / "server.json").get("run_id", "")):
                self.cleanup(before)  # the session before may have been killed with its launcher
            address = self._keeper.start(self.interrupts)
            with Line(self.monitor, address) as self._line:
                self._line.connect(CONNECT_S)
                self._start_others(address)
                status, reason = self._watch()
        except AsyncRLError as error:
            status, reason = "stopped" if self.interrupts.count else "failed", str(error)
        finally:
            end_all(self.children, grace_s=4.0 if self.interrupts.count < 2 else 0.0)
            end_descendants(self.spare)
            if self._keeper.run_id:
                self.cleanup(self._keeper.run_id)
        codes = {"completed": 0, "failed": 1, "stopped": self.interrupts.exit_code or 1}
        return Outcome(
            status=status,
            reason=reason,
            exit_code=codes[status],
            wall_s=time.monotonic() - began,
            cpu_s=ending.cpu_seconds(self.children),
            restarts=self._crew.restarts,
        )

    # -- start

    def _start_others(self, address: str) -> None:
        self._crew.add("learner", "learner", self.commands.learner(address), self.commands.ranks)
        for name in (f"actor{i}" for i in range(self.actors)):
            self._crew.add(name, "actor", self.commands.actor(address, name))
        for name, role in scorer_names(self.scorers):
            self._crew.add(name, role, self.commands.scorer(address, name, role))
        if self.evaluates:
            self._crew.add("evaluator", "evaluator", self.commands.evaluator(address))

    # -- watch

    def _watch(self) -> Verdict:
        """Until all have left, a process that cannot be replaced is given up, or the user asks twice."""
        while True:
            self._listen()
            if self.interrupts.count and not self._asked:
                self._ask_to_stop()
            if self.interrupts.count > 1:
                return "stopped", "ended at once on request; the newest checkpoint is from before"
            verdict = self._ended() or self._look_after()
            if verdict is not None:
                if verdict[0] == "failed" and self._stop is None and self._keeper.member.is_alive:
                    self._announce_failure(verdict[1])
                return verdict
            if self._deadline is not None and time.monotonic() > self._deadline:
                return self._late()

    def _listen(self) -> None:
        """One turn: messages of the server, or the time that one takes."""
        self._reopen()
        headers: list[Mapping[str, Any]] = []
        if self._line is not None and self._line.is_open:
            with suppress(DeadlineError):  # away for long: the line is opened again once there is a server
                headers = self._line.receive(_TURN_S)
        else:
            self.interrupts.wait(_TURN_S)
        self._keeper.turn(heard=bool(headers))
        for header in headers:
            if header["type"] == "status":
                self._take_status(header, time.monotonic())
            elif header["type"] == "stop":
                self._end_by(header)

    def _reopen(self) -> None:
        assert self._line is not None
        if self._line.is_open or not self._keeper.is_serving:
            return
        self._keeper.turn(heard=False)
        try:
            self._line.connect(REOPEN_S)
        except DeadlineError:
            return  # the next turn tries again; a server that stays silent is ended meanwhile
        self._repeat_stop()

    def _take_status(self, header: Mapping[str, Any], now: float) -> None:
        useful: list[str] = header.get("worked", [])
        self._crew.praise(useful)
        if useful:
            self._keeper.member.lives.work()
        for name in self._silence.look(header.get("silent", []), now):
            member = self._crew.owner(name)
            if member is not None and not self._asked and self._stop is None:
                silent_s = longest_silence_s(self.heartbeat_s)
                self._crew.kill(member, f"({name}) lives but has been silent for over {silent_s:.0f} s: it is ended")
        if self._asked and not self._learner.is_alive:  # nobody starts it again; a server that died may not know
            self._lost(self._learner.clients)
        self.display.update({**header, "restarts": sum(self._crew.restarts.values())})

    def _end_by(self, stop: Mapping[str, Any]) -> None:
        """The run ends: after an error nobody waits as long as after a wish to stop."""
        self._stop = stop
        latest = time.monotonic() + (FAILED_S if stop["error"] else WIND_DOWN_S)
        self._deadline = latest if self._deadline is None else min(self._deadline, latest)

    def _ask_to_stop(self) -> None:
        assert self._line is not None
        self._asked, self._deadline = True, time.monotonic() + WIND_DOWN_S
        self.display.note("stopping: the learner writes a checkpoint (once more to end at once)")
        self._line.send("stop", reason="asked to stop")

    def _repeat_stop(self) -> None:
        """The server is back: the wish may not have been on record before its death."""
        if self._asked and self._line is not None:
            self._line.send("stop", reason="asked to stop")

    # -- the end

    def _ended(self) -> Verdict | None:
        """The end of the run, once it is clear; ``None`` before."""
        server, learner = self._keeper.member.child, self._learner.child
        code, books = server.poll() if server is not None else None, self._books()
        if code and self._stop is None and books.get("status") == "failed":  # it ended the run, and then itself
            self._end_by({"reason": books.get("reason", ""), "error": True})
        if self._stop is not None and self._stop["error"]:
            if code is not None and self._line is not None:
                self._line.close()  # nobody is to be missed
            gone = all(child.poll() is not None for child in self.children)
            return self._failed_by(self._stop) if gone else None
        if code == 0 or (code is not None and self._stop is not None):
            return self._server_has_ended(books)
        if learner is not None and learner.poll() and (self._asked or self._stop is not None):
            return self._learner_is_gone(learner, books)
        return None

    def _learner_is_gone(self, learner: Child, books: ending.Books) -> Verdict | None:
        """It should have left in order: a failure, unless it was sent away, or an accident that the server hears of."""
        if self._stop is not None and not ending.has_joined(learner, books):
            return None
        if not ending.was_accident(learner):
            return "failed", ending.describe(learner)
        self.display.note(f"learner {learner.describe_end()}; see {learner.log}")
        self._learner.child = None
        self._lost(self._learner.clients)
        return None

    def _server_has_ended(self, books: ending.Books) -> Verdict:
        """The server left in order: who is still there, or was only starting, is ended."""
        self._listen()  # its last words
        if self._line is not None:
            self._line.close()  # nobody is to be missed
        end_all([child for child in self.children if not ending.has_begun(child, books)], grace_s=0.0)
        self._crew.release(self._learner)
        late = wait_all(self.children, FAILED_S)
        if late:
            self.display.note(f"{', '.join(c.name for c in late)} did not leave in time and will be ended")
        return ending.orderly_end(self._stop, books, asked=self.interrupts.count > 0)

    def _late(self) -> Verdict:
        alive = ", ".join(child.name for child in self.children if child.poll() is None)
        if self._stop is not None and self._stop["error"]:
            return self._failed_by(self._stop)
        return "failed", f"did not wind down within {WIND_DOWN_S:.0f} s: {alive} still ran"

    def _failed_by(self, stop: Mapping[str, Any]) -> Verdict:
        return "failed", ending.failure(str(stop["reason"]), self._crew.last_life("learner"))

    def _announce_failure(self, reason: str) -> None:
        assert self._line is not None
        self._line.send("fatal", reason=reason.partition("\n")[0])
        wait_all(self.children, FAILED_S)

    # -- lives

    def _look_after(self) -> Verdict | None:
        """Replace what has died or is frozen; the end of the run if something that it needs is given up."""
        if self._stop is not None:
            self._crew.release(self._learner)
            return None
        self._keeper.look_after(self._repeat_stop)
        books, away = self._books(), not self._keeper.is_serving
        for member in [] if self._asked else list(self._crew.members.values()):
            if member.role != "server":
                self._crew.tend(member, lambda child: ending.has_died_early(child, books), excused=away)
        for role in ("server", "learner"):
            if self._crew.members[role].lives.given_up:
                return "failed", ending.describe(self._crew.last_life(role))
        for role, what in _NEEDED.items():
            here = self._crew.of(role)
            if here and all(member.lives.given_up for member in here):
                return "failed", f"no {what} is left; {ending.describe(self._crew.last_life(here[-1].name))}"
        return None

    def _lost(self, clients: Iterable[str]) -> None:
        """Tell the server who is dead, so that it need not wait until it misses them."""
        for name in clients:
            self._silence.forgive(name)
            if self._line is not None:
                self._line.send("dead", name=name)

    @property
    def _learner(self) -> Member:
        return self._crew.members["learner"]

    def _books(self) -> ending.Books:
        """What the server has written in this session; those of a session before say nothing about this one."""
        books = read_json(self.commands.out / "books.json")
        return books if books.get("run_id", self._keeper.run_id) == self._keeper.run_id else {}


def scorer_names(scorers: Mapping[str, int]) -> list[tuple[str, str]]:
    """Name and role of each scorer: ``reward0``, ``reward1``, ``reference0``."""
    return [(f"{role}{i}", role) for role, count in scorers.items() for i in range(count)]
