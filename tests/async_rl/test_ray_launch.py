"""The session around a fleet: a server out of reach, Ctrl-C twice, a silent actor; all that is around it is played."""

from io import StringIO

import pytest
from rich.console import Console

from async_rl.config import load_any
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.launch import folder_lock, ray_run
from async_rl.launch.fleet_rules import FleetRules
from async_rl.launch.folder_lock import FolderLock
from async_rl.launch.interrupts import Interrupts
from async_rl.launch.job import Job
from async_rl.launch.places import Ended, Started
from async_rl.launch.ray_run import GOODBYE_S, SERVE_S, RayRun, worker_prefix

DONE = Ended(exit_code=0, sentence=None, told="ended with exit code 0")


class World:
    """A cluster with room, a display, interrupts and a monitor; time passes where somebody waits."""

    def __init__(self, monkeypatch):
        self.now, self.notes, self.begun, self.sent = 0.0, [], [], []
        self.count, self.exit_code = 0, 0
        self.status = dict
        self.on_turn = lambda: None
        monkeypatch.setattr(ray_run.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(RayRun, "_monitor", lambda run, address: self)

    # a cluster

    def check(self):
        pass

    def close(self):
        pass

    def begin(self, task, resources):
        self.begun.append(Life(task))
        return self.begun[-1]

    def of(self, name):
        return [life for life in self.begun if life.task.name.endswith(name)]

    # a display

    def note(self, text):
        self.notes.append((self.now, text))

    def update(self, status):
        pass

    # interrupts

    def wait(self, seconds):
        self.now += seconds
        self.on_turn()

    def interrupt(self):
        self.count, self.exit_code = self.count + 1, 130

    # a monitor

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def connect(self, timeout_s):
        pass

    def send(self, kind, **fields):
        self.sent.append((kind, fields))

    def receive(self, timeout_s):
        self.wait(timeout_s)
        return [({"type": "status", "status": "running", "clients": [], **self.status()}, None)]


class Life:
    def __init__(self, task):
        self.task, self.is_placed, self.reports, self.stops, self.is_removed = task, False, [], 0, False

    def poll(self):
        if not self.is_placed:
            self.is_placed = True
            return Started(pid=1, host="n1", address="127.0.0.1:9" if self.task.listens else "")
        return self.reports.pop(0) if self.reports else None

    def stop(self):
        self.stops += 1

    def remove(self):
        self.is_removed = True


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


@pytest.fixture
def run(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job.of("arithmetic", ["buffer.heartbeat_s=1.0"], tmp_path / "run", None)
    rules = FleetRules(least=2, most=2, learner={"CPU": 2.0}, worker={"CPU": 1.0})
    return RayRun(job, rules, world, world, world)


def test_a_server_that_nobody_can_reach_from_here_is_told_and_ends_the_run(world, run, monkeypatch):
    monkeypatch.setattr(ray_run, "unreachable", lambda address, seconds: "no route to host")
    world.on_turn = lambda: world.of("learner")[0].stops and world.of("learner")[0].reports.append(DONE)
    with pytest.raises(AsyncRLError, match=r"127\.0\.0\.1:9 does not answer this host: no route.*learner\.log"):
        run.run()
    assert SERVE_S < world.now < SERVE_S + 2
    said = [now for now, text in world.notes if "does not answer" in text]
    assert 25 <= len(said) <= SERVE_S / 60 + 1, "about once a minute"
    assert world.of("learner")[0].stops == 1, "asked for a checkpoint"
    assert all(life.is_removed for life in world.begun)


def test_a_second_interrupt_ends_what_does_not_end(world, run, monkeypatch):
    monkeypatch.setattr(ray_run, "unreachable", lambda address, seconds: None)

    def interrupts():
        if world.now > 10 * (world.count + 1) and world.count < 2:
            world.interrupt()

    world.on_turn = interrupts
    assert run.run() == 130
    assert 20 + GOODBYE_S <= world.now < 20 + GOODBYE_S + 2
    assert world.of("learner")[0].stops == 2, "as twice Ctrl-C at the command by hand"
    assert all(life.is_removed for life in world.begun)


def test_an_actor_that_is_silent_for_long_gets_another_life(world, run, monkeypatch):
    monkeypatch.setattr(ray_run, "unreachable", lambda address, seconds: None)
    name = f"{worker_prefix(run.job.out)}.actor1"

    def status():
        if world.now > 60:
            world.of("learner")[0].reports.append(DONE)
        return {"silent": [name] if world.now > 5 else [], "worked": [name]}

    world.status = status
    assert run.run() == 0
    first, _second, *others = world.of("actor1")
    assert first.is_removed
    assert not others, "the second life is given time to be heard"
    assert ("dead", {"name": name}) in world.sent
    (told,) = [now for now, text in world.notes if "silent for over 10 s" in text]
    assert 15 < told < 17, "six periods of a second, but at least ten seconds"


def test_a_second_launcher_in_a_run_folder_is_refused_and_changes_nothing(world, run, monkeypatch):
    monkeypatch.setattr(ray_run, "connect", lambda address: world)
    monkeypatch.setattr(folder_lock, "WAIT_S", 0.3)
    run.job.make()
    run.job.write()
    other = Job.of(None, ["steps=7"], None, run.job.out)
    console = Console(file=StringIO())
    with (
        Interrupts() as interrupts,
        FolderLock(run.job.files, interrupts, console.print),
        pytest.raises(ConfigError, match="another async-rl works in"),
    ):
        ray_run.run_ray(other, run.rules, "auto", console)
    assert load_any(str(run.job.config_file)).steps != 7
    assert world.begun == []
