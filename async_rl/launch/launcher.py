"""Starts the processes of a run, watches them, ends them: after it returns none is left, whatever happened.

    server ──server.json──► launcher ──address──► learner group, actors, scorers, evaluator
       ▲ └─ status, stop ─► monitor ─► display
       └─── dead, stop, fatal

| event                          | what follows                                                                      |
|--------------------------------|-----------------------------------------------------------------------------------|
| a worker dies                  | reported to the server, started again after 1, 2, 4 s, then given up              |
| the last of a role is given up | the run fails with the end of its log, unless it is the evaluator                 |
| server or learner dies         | the run fails, with the end of its log in the message                             |
| the server says stop           | every process has a bounded time to leave                                         |
| Ctrl-C or SIGTERM              | the server is asked to stop: the learner writes a checkpoint; exit code 130 or 143 |
| the same again                 | everything is killed at once                                                      |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_rl.errors import AsyncRLError
from async_rl.launch.children import Child, become_subreaper, end_all, end_descendants, wait_all
from async_rl.launch.commands import Commands
from async_rl.launch.interfaces import Display, Monitor, Outcome, Status
from async_rl.launch.interrupts import Interrupts
from async_rl.runfolder import read_json

SERVER_START_S = 60.0
"""The server must have bound its address within this time."""
CONNECT_S = 30.0
WIND_DOWN_S = 300.0
"""Time for the last checkpoint and evaluation after a stop."""
FAILED_S = 10.0
"""Time to leave after an error."""
MAX_RESTARTS = 3
BACKOFF_S = 1.0
"""Before the first restart; twice as long before each further one."""
_TURN_S = 0.2
_NEEDED = {"actor": "actor", "reward": "reward scorer", "reference": "reference scorer"}
"""Roles without which a run cannot go on, as messages name them."""


@dataclass(slots=True)
class Worker:
    """An actor, a scorer or the evaluator: a process that may be started again."""

    name: str
    role: str
    """``actor``, ``reward``, ``reference`` or ``evaluator``."""
    command: Sequence[str]
    child: Child | None = None
    restarts: int = 0
    restart_at: float | None = None
    """When the next life begins; ``None`` while it lives or once it is given up."""

    @property
    def given_up(self) -> bool:
        """Whether it is dead for good."""
        return self.child is None and self.restart_at is None


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
    children: list[Child] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)

    def run(self) -> Outcome:
        """Start everything and stay until the end."""
        become_subreaper()
        began, run_id = time.monotonic(), ""
        try:
            address, run_id = self._start_server()
            with self.monitor(address) as line:
                line.connect(CONNECT_S)
                self._start_others(address)
                status, reason = self._watch(line)
        except AsyncRLError as error:
            status, reason = "failed", str(error)
            if self.interrupts.count:
                status = "stopped"
        finally:
            end_all(self.children, grace_s=4.0 if self.interrupts.count < 2 else 0.0)
            end_descendants()
            if run_id:
                self.cleanup(run_id)
        return self._outcome(status, reason, time.monotonic() - began)

    # -- start

    def _start_server(self) -> tuple[str, str]:
        note = self.commands.out / "server.json"
        if before := str(read_json(note).get("run_id", "")):  # the life before may have been killed with its launcher
            self.cleanup(before)
        note.unlink(missing_ok=True)
        server = self._start("server", self.commands.server())
        deadline = time.monotonic() + SERVER_START_S
        while not (found := read_json(note)).get("address"):
            if server.poll() is not None:
                raise AsyncRLError(describe(server))
            if self.interrupts.count:
                raise AsyncRLError("interrupted while starting")
            if time.monotonic() > deadline:
                raise AsyncRLError(
                    f"the buffer server did not bind its address within {SERVER_START_S:.0f} s; {_see(server)}"
                )
            wait_all([server], 0.05)
        return local_address(str(found["address"])), str(found.get("run_id", ""))

    def _start_others(self, address: str) -> None:
        self._start("learner", self.commands.learner(address))
        for i in range(self.actors):
            self.workers.append(Worker(f"actor{i}", "actor", self.commands.actor(address, f"actor{i}")))
        for name, role in scorer_names(self.scorers):
            self.workers.append(Worker(name, role, self.commands.scorer(address, name, role)))
        if self.evaluates:
            self.workers.append(Worker("evaluator", "evaluator", self.commands.evaluator(address)))
        for worker in self.workers:
            worker.child = self._start(worker.name, worker.command)

    def _start(self, name: str, command: Sequence[str]) -> Child:
        env = dict(self.env)
        if name in self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = self.gpus[name]
        child = Child.start(name, command, self.commands.out / "logs" / f"{name}.log", env)
        self.children.append(child)
        return child

    # -- watch

    def _watch(self, line: Monitor) -> tuple[Status, str]:
        """Until all have left, a process that cannot be replaced dies, or the user asks twice."""
        server, learner = self.children[0], self.children[1]
        stop: Mapping[str, Any] | None = None
        deadline: float | None = None
        asked = False
        while True:
            before, stop = stop, self._listen(line, server, stop)
            if self.interrupts.count and not asked:
                asked, deadline = True, time.monotonic() + WIND_DOWN_S
                self.display.note("stopping: the learner writes a checkpoint (once more to end at once)")
                line.send("stop", reason="asked to stop")
            if self.interrupts.count > 1:
                return "stopped", "ended at once on request; the newest checkpoint is from before"
            if stop is not None and stop is not before:  # after an error nobody waits as long as after a wish to stop
                latest = time.monotonic() + (FAILED_S if stop["error"] else WIND_DOWN_S)
                deadline = latest if deadline is None else min(deadline, latest)
            ended = self._ended(server, learner, stop)
            if ended is None and stop is None and not asked:
                ended = self._tend_workers(line)
            if ended is not None:
                if ended[0] == "failed" and stop is None and server.poll() is None:
                    self._announce_failure(line, ended[1])
                return ended
            if deadline is not None and time.monotonic() > deadline:
                return self._late(stop)

    def _listen(self, line: Monitor, server: Child, stop: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        gone = server.poll() is not None
        if gone:
            wait_all(self.children, _TURN_S)
        try:
            messages = line.receive(0.0 if gone else _TURN_S)
        except AsyncRLError:
            if gone:  # a server that has left says nothing more
                return stop
            raise
        for header, _ in messages:
            if header["type"] == "status":
                self.display.update(header)
            elif header["type"] == "stop":
                stop = header
        return stop

    def _ended(self, server: Child, learner: Child, stop: Mapping[str, Any] | None) -> tuple[Status, str] | None:
        """The end of the run, once it is clear; ``None`` before."""
        if stop is not None and stop["error"]:
            return ("failed", self._failure(stop)) if all(c.poll() is not None for c in self.children) else None
        if server.poll() == 0:
            return self._server_has_ended(stop)
        if server.poll():
            return "failed", describe(server)
        if learner.poll() and not (stop is not None and self._came_too_late(learner)):
            return "failed", describe(learner)
        return None

    def _came_too_late(self, child: Child) -> bool:
        """Whether it was only starting when the run ended in order, so that the server sent it away."""
        return not _has_joined(child, read_json(self.commands.out / "books.json"))

    def _server_has_ended(self, stop: Mapping[str, Any] | None) -> tuple[Status, str]:
        """The server left in order: its verdict counts, and who is still there (or was only starting) is ended."""
        books = read_json(self.commands.out / "books.json")
        end_all([c for c in self.children if not _has_joined(c, books)], grace_s=0.0)  # they cannot have heard its stop
        late = wait_all(self.children, FAILED_S)
        if late:
            self.display.note(f"{', '.join(c.name for c in late)} did not leave in time and will be ended")
        reason = str(stop["reason"]) if stop else "asked to stop" if self.interrupts.count else "done"
        if books.get("status") == "completed":  # a wish to stop that came after the last step changes nothing
            return "completed", reason
        return "stopped" if books.get("status") == "stopped" or self.interrupts.count else "completed", reason

    def _failure(self, stop: Mapping[str, Any]) -> str:
        """The server's sentence, and which rank was killed, or the end of the learner's log if it holds a traceback."""
        reason, learner = str(stop["reason"]), self.children[1]
        killed = learner.killed_rank()
        if killed:
            return f"{reason}; {killed}"
        return f"{reason}\n{last_lines(learner)}" if any("Traceback" in line for line in learner.tail(60)) else reason

    def _late(self, stop: Mapping[str, Any] | None) -> tuple[Status, str]:
        alive = ", ".join(c.name for c in self.children if c.poll() is None)
        if stop is not None and stop["error"]:
            return "failed", self._failure(stop)
        return "failed", f"did not wind down within {WIND_DOWN_S:.0f} s: {alive} still ran"

    def _announce_failure(self, line: Monitor, reason: str) -> None:
        line.send("fatal", reason=reason.partition("\n")[0])
        wait_all(self.children, FAILED_S)

    def _tend_workers(self, line: Monitor) -> tuple[Status, str] | None:
        """Report and replace workers that died; the end of the run if none is left of a role that it needs."""
        for worker in self.workers:
            if worker.child is not None and self._has_died(worker.child):
                self._bury(worker, line)
            elif worker.restart_at is not None and time.monotonic() >= worker.restart_at:
                worker.restarts, worker.restart_at = worker.restarts + 1, None
                worker.child = self._start(worker.name, worker.command)
        for role, what in _NEEDED.items():
            here = [worker for worker in self.workers if worker.role == role]
            if here and all(worker.given_up for worker in here):
                last = next(c for c in reversed(self.children) if c.name == here[-1].name)
                return "failed", f"no {what} is left; {describe(last)}"
        return None

    def _has_died(self, child: Child) -> bool:
        """Whether it ended before its time; 0 means that it left on purpose, but not while there are steps to train."""
        code = child.poll()
        if code != 0:
            return code is not None
        books = read_json(self.commands.out / "books.json")  # written before the server sends anybody home
        return books.get("status") == "running" and int(books.get("step", 0)) < int(books.get("steps", 0))

    def _bury(self, worker: Worker, line: Monitor) -> None:
        child = worker.child
        assert child is not None
        line.send("dead", name=worker.name)
        again = worker.restarts < MAX_RESTARTS
        worker.child = None
        worker.restart_at = time.monotonic() + BACKOFF_S * 2**worker.restarts if again else None
        end = "starts again" if again else "is given up"
        why = child.cause()
        self.display.note(f"{worker.name} {child.describe_end()} and {end}{f': {why}' if why else ''}; {_see(child)}")

    # -- end

    def _outcome(self, status: Status, reason: str, wall_s: float) -> Outcome:
        cpu_s: dict[str, float] = {}
        for child in self.children:
            cpu_s[child.name] = cpu_s.get(child.name, 0.0) + child.cpu_s
        codes = {"completed": 0, "failed": 1, "stopped": self.interrupts.exit_code or 1}
        return Outcome(
            status=status,
            reason=reason,
            exit_code=codes[status],
            wall_s=wall_s,
            cpu_s={name: round(value, 3) for name, value in cpu_s.items()},
            restarts={w.name: w.restarts for w in self.workers if w.restarts},
        )


def scorer_names(scorers: Mapping[str, int]) -> list[tuple[str, str]]:
    """Name and role of each scorer: ``reward0``, ``reward1``, ``reference0``."""
    return [(f"{role}{i}", role) for role, count in scorers.items() for i in range(count)]


def describe(child: Child) -> str:
    """Why a process ended: its own sentence if it left one, and the last lines of its log."""
    why = child.killed_rank() or child.cause()
    return f"{child.name} {child.describe_end()}{f': {why}' if why else ''}\n{last_lines(child)}"


def last_lines(child: Child) -> str:
    """The end of its log, as a quotation."""
    lines = "\n".join(f"  {line}" for line in child.tail())
    return f"last lines of {child.log}:\n{lines}" if lines else f"{child.log} is empty"


def local_address(address: str) -> str:
    """The address for clients on this host, when the server listens on all interfaces."""
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//*:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _has_joined(child: Child, books: Mapping[str, Any]) -> bool:
    """Whether the server has met it, as far as its books tell; the learner is one process here, whatever its ranks."""
    if child.name == "server" or "clients" not in books:
        return True
    return any(child.name in (client.get("name"), client.get("role")) for client in books["clients"])


def _see(child: Child) -> str:
    return f"see {child.log}"
