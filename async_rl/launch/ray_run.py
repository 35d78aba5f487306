"""``async-rl launch --ray``: a run on an existing Ray cluster, from its first place to its exit code.

fleet ◄── reports ── Ray            learner and actors run the commands by hand; their data is their own
  ▲ scale(n)
appetite ◄── status ── monitor line ──► server (on the learner's node)         Ctrl-C ─► learner ─► checkpoint
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass, field

from rich.console import Console

from async_rl.curve import ClientKeys
from async_rl.errors import AsyncRLError, ConfigError, DeadlineError, HandshakeError
from async_rl.launch.fleet import Fleet, FleetRules
from async_rl.launch.hunger import Appetite
from async_rl.launch.interfaces import Display, Monitor
from async_rl.launch.interrupts import Interrupts
from async_rl.launch.job import Job
from async_rl.launch.launcher import CONNECT_S, WIND_DOWN_S
from async_rl.launch.line import Line
from async_rl.launch.progress import make_display
from async_rl.launch.ray_cluster import RayCluster, connect
from async_rl.launch.ray_tasks import RayTasks
from async_rl.launch.reach import unreachable

WINDOW_PERIODS = 2.0
"""Hunger is measured over so many heartbeat periods: every client has spoken in each of them."""
GOODBYE_S = 15.0
"""After the run actors have so long to leave by themselves."""
_TURN_S = 0.2
_PROBE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """What is asked of the cluster."""

    address: str = "auto"
    """``auto`` or ``HOST:PORT`` of its head."""
    least: int = 1
    """Actors at any time."""
    most: int = 1
    """Actors at the busiest time."""
    learners: int = 1
    """Learner hosts."""
    learner_gpus: int = 0
    """A host."""
    learner_cpus: float | None = None
    """A host; ``None``: one a rank, and one for server and evaluation."""
    actor_gpus: int = 0
    actor_cpus: float = 1.0
    trusted_network: bool = False
    """Ranks of several learner hosts talk unencrypted."""
    place_s: float = 120.0
    """The cluster has so long to find places."""

    def rules(self, job: Job) -> FleetRules:
        """The same for the fleet.

        Raises:
            ConfigError: they contradict each other or the configuration.
        """
        ranks, device = job.config.learner.ranks, job.config.device
        if self.most < self.least:
            raise ConfigError(f"--max-actors {self.most} is below --min-actors {self.least}")
        if ranks % self.learners:
            raise ConfigError(f"learner.ranks = {ranks} cannot be split over {self.learners} learner nodes")
        if self.learners > 1 and not self.trusted_network:
            raise ConfigError(
                f"{self.learners} learner nodes: gloo and NCCL do not encrypt what ranks tell each other; say "
                "--trusted-network if only you and your cluster can read that network"
            )
        if device == "cuda" and not (self.learner_gpus and self.actor_gpus):
            raise ConfigError("device = 'cuda': ask for GPUs with --learner-gpus and --actor-gpus")
        cpus = self.learner_cpus or ranks // self.learners + 1.0
        return FleetRules(
            least=self.least,
            most=self.most,
            learners=self.learners,
            scorers=tuple(job.scorers),
            learner_resources=_resources(cpus, self.learner_gpus),
            worker_resources=_resources(self.actor_cpus, self.actor_gpus),
            place_s=self.place_s,
        )


def run_ray(job: Job, options: RayOptions, console: Console) -> int:
    """Run a job on a cluster; the exit code.

    Args:
        job: the run; written here.
        options: what is asked of the cluster.
        console: where it shows itself.

    Raises:
        ConfigError: options contradict each other, or Ray is not installed.
        AsyncRLError: there is no cluster, no room in it, or the run failed.
    """
    rules = options.rules(job)
    with closing(connect(options.address)) as cluster:  # before Interrupts: Ray sets a handler of its own
        job.write()
        with Interrupts() as interrupts, make_display(console, job.config) as display:
            display.note(f"{'going on with' if job.resumes else 'run folder'} {job.out}")
            return RayRun(job, rules, options, cluster, display, interrupts).run()


@dataclass(slots=True)
class RayRun:
    """One run. Use it once, from the main thread."""

    job: Job
    rules: FleetRules
    options: RayOptions
    cluster: RayCluster
    display: Display
    interrupts: Interrupts
    _fleet: Fleet = field(init=False)
    _appetite: Appetite = field(init=False)
    _line: Line | None = field(init=False, default=None)
    _asked: int = field(init=False, default=0)
    """How often the learner was asked to stop."""

    def __post_init__(self) -> None:
        tasks = RayTasks(
            self.job,
            self.options.learners,
            trusted_network=self.options.trusted_network,
            path=os.environ.get("PYTHONPATH", ""),
        )
        self._fleet = Fleet(self.cluster, tasks, self.rules, self.job.out.name[:80], self.display.note, self._tell_dead)
        self._appetite = Appetite(self.rules.least, WINDOW_PERIODS * self.job.config.buffer.heartbeat_s)

    def run(self) -> int:
        """Until the learner has ended for good; its exit code.

        Raises:
            AsyncRLError: the run cannot go on; the learner has been asked for a checkpoint.
        """
        fleet = self._fleet
        try:
            fleet.begin(time.monotonic())
            try:
                while fleet.end is None:
                    self._turn()
            except AsyncRLError as error:
                self.display.note(f"the run ends: {str(error).partition(chr(10))[0]}")
                self._wind_down()
                raise
            self._say_goodbye()
        finally:
            self._close_line()
            fleet.close()
        assert fleet.end is not None
        code = self.interrupts.exit_code or fleet.end.exit_code
        if fleet.end.exit_code == 0:
            self.display.note(f"done; the run is in {self.job.out}")
        elif not self.interrupts.count:
            raise AsyncRLError(f"the learner {fleet.end.told}")
        return code

    def _turn(self) -> None:
        now = time.monotonic()
        while self._asked < min(2, self.interrupts.count):
            self._asked += 1
            again = " (once more to end at once)" if self._asked == 1 else ""
            self.display.note(f"stopping: the learner is asked to end{again}")
            self._fleet.stop()
        self._fleet.turn(now)
        if not self._fleet.is_serving:
            self._close_line()
        if self._line is not None and self._line.is_open:
            self._listen(self._line)
        else:
            self._reach_server()

    def _reach_server(self) -> None:
        """Join the run as soon as its server answers; until then one turn's time passes."""
        address = f"tcp://{self._fleet.address}"
        is_over = self._fleet.is_over or not self._fleet.address
        if is_over or unreachable(address, _PROBE_S):
            self.interrupts.wait(_TURN_S)
            return
        line = Line(self._monitor, address)
        try:
            line.connect(CONNECT_S)
        except (DeadlineError, HandshakeError) as error:
            self.display.note(f"the server does not let us watch: {error}")
            self.interrupts.wait(_TURN_S)
            return
        self._line = line
        self._fleet.serve(time.monotonic())

    def _listen(self, line: Line) -> None:
        try:
            headers = line.receive(_TURN_S)
        except (DeadlineError, HandshakeError):
            self._close_line()  # away for long: joined again when it is back
            return
        fleet = self._fleet
        for header in headers:
            if header["type"] == "stop":  # the last that it says
                fleet.is_over = True
                self._close_line()
                return
            if header["type"] != "status":
                continue
            now = time.monotonic()
            self.display.update(header)
            fleet.praise(header.get("worked", []))
            if fleet.is_over or header.get("status") != "running":
                continue
            count = len(fleet.actors())
            aim = self._appetite.look(header["clients"], count, fleet.most(now), now)
            if aim != count:
                fleet.scale(aim, now)

    def _monitor(self, address: str) -> Monitor:
        from async_rl.client import Client

        keys = ClientKeys.of(self.job.config.buffer.keys)
        return Client(address, "monitor", f"ray-{os.getpid()}", self.job.config.contract_hash(), keys=keys)

    def _tell_dead(self, name: str) -> None:
        """Its tickets return at once, and not when it is missed."""
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


def _resources(cpus: float, gpus: int) -> dict[str, float]:
    return {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
