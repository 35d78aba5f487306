"""``async-rl launch --ray``: a run on an existing Ray cluster, from its first place to its exit code.

fleet ◄── reports ── Ray            learner and actors run the commands by hand; their data is their own
  ▲ scale(n)
appetite ◄── status ── monitor line ──► server (on the learner's node)         Ctrl-C ─► learner ─► checkpoint
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from async_rl.curve import ClientKeys
from async_rl.errors import AsyncRLError, DeadlineError, HandshakeError
from async_rl.launch.fleet import Fleet
from async_rl.launch.fleet_rules import FleetRules
from async_rl.launch.folder_lock import FolderLock
from async_rl.launch.hunger import Appetite
from async_rl.launch.interfaces import Display, Monitor
from async_rl.launch.interrupts import Interrupts
from async_rl.launch.job import Job
from async_rl.launch.launcher import CONNECT_S, WIND_DOWN_S
from async_rl.launch.line import Line
from async_rl.launch.preflight import WARMUP_TIMEOUT_S
from async_rl.launch.progress import make_display
from async_rl.launch.ray_cluster import RayCluster, connect
from async_rl.launch.ray_tasks import RayTasks
from async_rl.launch.reach import unreachable
from async_rl.launch.silence import Silence, longest_silence_s

WINDOW_PERIODS = 2.0
"""Hunger is measured over so many heartbeat periods: every client has spoken in each of them."""
GOODBYE_S = 15.0
"""After the run actors have so long to leave by themselves; after the second Ctrl-C the learner."""
SERVE_S = WARMUP_TIMEOUT_S + 120.0
"""A learner that runs has fetched its model and started its server within this time."""
SAY_S = 60.0
"""How often a server that does not answer is spoken of."""
_TURN_S = 0.2
_PROBE_S = 0.5


def run_ray(job: Job, rules: FleetRules, address: str, console: Console) -> int:
    """Run a job on a cluster; the exit code.

    Args:
        job: the run; written here.
        rules: what is asked of the cluster.
        address: ``auto`` or ``HOST:PORT`` of its head.
        console: where it shows itself.

    Raises:
        ConfigError: Ray is not installed, or the run folder cannot be used, or is in use.
        AsyncRLError: there is no cluster, no room in it, or the run failed.
    """
    with closing(connect(address)) as cluster:  # before Interrupts: Ray sets a handler of its own
        job.make()
        with Interrupts() as interrupts, FolderLock(job.files, interrupts, console.print):
            job.write()  # under the lock: another launcher starts its commands from it
            with make_display(console, job.config) as display:
                display.note(f"{'going on with' if job.resumes else 'run folder'} {job.out}")
                return RayRun(job, rules, cluster, display, interrupts).run()


def worker_prefix(out: Path) -> str:
    """What the names of a run's workers begin with: an actor's own folder goes by its name, whatever run it is of."""
    return f"{out.name[:60]}-{hashlib.sha256(os.fsencode(out)).hexdigest()[:4]}"


@dataclass(slots=True)
class RayRun:
    """One run. Use it once, from the main thread."""

    job: Job
    rules: FleetRules
    cluster: RayCluster
    display: Display
    interrupts: Interrupts
    _fleet: Fleet = field(init=False)
    _appetite: Appetite = field(init=False)
    _silence: Silence = field(init=False)
    _line: Line | None = field(init=False, default=None)
    _asked: int = field(init=False, default=0)
    """How often the learner was asked to stop."""
    _latest: float | None = field(init=False, default=None)
    """When the run is ended by force."""
    _deaf_since: float | None = field(init=False, default=None)
    """Since when a learner runs whose server does not answer."""
    _said_at: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        tasks = RayTasks(self.job, self.rules.learners, os.environ.get("PYTHONPATH", ""))
        prefix, heartbeat_s = worker_prefix(self.job.out), self.job.config.buffer.heartbeat_s
        self._fleet = Fleet(self.cluster, tasks, self.rules, prefix, self.display.note, self._tell_dead)
        self._appetite = Appetite(self.rules.least, WINDOW_PERIODS * heartbeat_s)
        self._silence = Silence(longest_silence_s(heartbeat_s))

    def run(self) -> int:
        """Until the learner has ended for good; its exit code.

        Raises:
            AsyncRLError: the run cannot go on; the learner has been asked for a checkpoint.
        """
        fleet = self._fleet
        try:
            fleet.begin(time.monotonic())
            try:
                while fleet.end is None and not self._is_late():
                    self._turn()
            except AsyncRLError as error:
                self.display.note(f"the run ends: {str(error).partition(chr(10))[0]}")
                self._wind_down()
                raise
            self._say_goodbye()
        finally:
            self._close_line()
            fleet.close()
        if self.interrupts.exit_code:
            return self.interrupts.exit_code
        assert fleet.end is not None
        if fleet.end.exit_code:
            raise AsyncRLError(f"the learner {fleet.end.told}")
        self.display.note(f"done; the run is in {self.job.out}")
        return 0

    def _turn(self) -> None:
        now = time.monotonic()
        self._hear_interrupts(now)
        self.cluster.check()
        self._fleet.turn(now)
        if not self._fleet.is_serving:
            self._close_line()
        if self._line is not None and self._line.is_open:
            self._listen(self._line)
        else:
            self._reach_server(now)

    def _hear_interrupts(self, now: float) -> None:
        while self._asked < min(2, self.interrupts.count):
            self._asked += 1
            again = " (once more to end at once)" if self._asked == 1 else " at once"
            self.display.note(f"stopping: the learner is asked to end{again}")
            self._fleet.stop()
            self._latest = now + GOODBYE_S if self._asked == 2 else None

    def _is_late(self) -> bool:
        return self._latest is not None and time.monotonic() > self._latest

    # ------------------------------------------------------------------ the server

    def _reach_server(self, now: float) -> None:
        """Join the run as soon as its server answers; until then one turn's time passes."""
        fleet = self._fleet
        if fleet.is_over or not fleet.address:
            self._deaf_since = None
            self.interrupts.wait(_TURN_S)
            return
        why = self._join(f"tcp://{fleet.address}")
        if why:
            self._complain(why, now)
            self.interrupts.wait(_TURN_S)
            return
        self._deaf_since = None
        fleet.serve(time.monotonic())

    def _join(self, address: str) -> str:
        """Open a line to the server; why that fails, or nothing."""
        if why := unreachable(address, _PROBE_S):
            return why
        line = Line(self._monitor, address)
        try:
            line.connect(CONNECT_S)
        except (DeadlineError, HandshakeError) as error:
            return str(error)
        self._line = line
        return ""

    def _complain(self, why: str, now: float) -> None:
        """A server that starts is waited for; one that nobody can reach from here would be waited for in silence.

        Raises:
            AsyncRLError: it has not answered for :data:`SERVE_S`.
        """
        if self._deaf_since is None:
            self._deaf_since = self._said_at = now
        told = f"the server at {self._fleet.address} does not answer this host: {why}"
        if now - self._deaf_since > SERVE_S:
            raise AsyncRLError(f"{told}; see {self.job.files / 'learner.log'}, and launch from a node that reaches it")
        if now - self._said_at > SAY_S:
            self._said_at = now
            self.display.note(told)

    def _listen(self, line: Line) -> None:
        try:
            headers = line.receive(_TURN_S)
        except (DeadlineError, HandshakeError):
            self._close_line()  # away for long: joined again when it is back
            return
        for header in headers:
            if header["type"] == "stop":  # the last that it says
                self._fleet.is_over = True
                self._close_line()
                return
            if header["type"] == "status":
                self._hear(header, time.monotonic())

    def _hear(self, status: Mapping[str, Any], now: float) -> None:
        """What a ``status`` means for the fleet."""
        fleet = self._fleet
        self.display.update(status)
        fleet.praise(status.get("worked", []))
        if fleet.is_over or status.get("status") != "running":
            return
        for name in self._silence.look(status.get("silent", []), now):
            limit_s = longest_silence_s(self.job.config.buffer.heartbeat_s)
            fleet.end_silent(name, f"lives but has been silent for over {limit_s:.0f} s: it is ended", now)
        names = [member.name for member in fleet.actors()]
        aim = self._appetite.look(status["clients"], names, fleet.most(now), now)
        if aim != len(names):
            fleet.scale(aim, now)

    def _monitor(self, address: str) -> Monitor:
        from async_rl.client import Client

        keys = ClientKeys.of(self.job.config.buffer.keys)
        return Client(address, "monitor", f"ray-{os.getpid()}", self.job.config.contract_hash(), keys=keys)

    def _tell_dead(self, name: str) -> None:
        """Its tickets return at once, and not when it is missed."""
        self._silence.forgive(name)
        if self._line is not None:
            self._line.send("dead", name=name)

    def _close_line(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()

    # ------------------------------------------------------------------ the end

    def _wind_down(self) -> None:
        """The run cannot go on: the learner may still write its checkpoint."""
        self._fleet.stop()
        deadline = time.monotonic() + WIND_DOWN_S
        while self._fleet.end is None and time.monotonic() < deadline and self.interrupts.count < 2:
            try:
                self._fleet.turn(time.monotonic())
            except AsyncRLError:
                return  # what it says is known: the run fails already
            self.interrupts.wait(_TURN_S)

    def _say_goodbye(self) -> None:
        """Actors have heard that the run is over, and leave by themselves."""
        deadline = time.monotonic() + GOODBYE_S
        while not self._fleet.dismiss() and time.monotonic() < deadline and self.interrupts.count < 2:
            self.interrupts.wait(_TURN_S)
