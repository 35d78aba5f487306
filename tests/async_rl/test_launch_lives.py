"""The launcher with small stand-in processes that die again and again: who comes back, how, and who does not."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass

import pytest

from async_rl.errors import DeadlineError
from async_rl.launch import launcher as launcher_module
from async_rl.launch import policy, server_keeper, silence
from async_rl.launch.children import descendants
from async_rl.launch.commands import Commands
from async_rl.launch.interrupts import Interrupts
from async_rl.launch.launcher import Launcher

pytestmark = pytest.mark.real

# Writes down its pid and arguments as a life, then does what the file OUT/do_NAME says: an exit code, or a negative
# signal; the file is taken away first. "freeze" lets it stay.
STAND_IN = """
import json, os, signal, sys, threading
from pathlib import Path
name, out, *rest = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
with (out / f"lives_{name}").open("a") as lives:
    lives.write(json.dumps([os.getpid(), rest]) + "\\n")
if name == "server" and not (out / "mute").exists():
    (out / "tmp").write_text(json.dumps({"address": "tcp://127.0.0.1:1", "pid": os.getpid(), "run_id": "r1"}))
    (out / "tmp").rename(out / "server.json")
do, done = out / f"do_{name}", out / f"done_{name}_{os.getpid()}"
while True:
    threading.Event().wait(0.01)
    try:
        do.rename(done)
    except FileNotFoundError:
        continue
    code, _, say = done.read_text().partition(" ")
    print(say, flush=True)
    os._exit(int(code)) if int(code) >= 0 else os.kill(os.getpid(), -int(code))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIns(Commands):
    def server(self, *, recover=False):
        return [sys.executable, "-c", STAND_IN, "server", str(self.out), *(["--recover"] if recover else [])]

    def learner(self, address):
        return [sys.executable, "-c", STAND_IN, "learner", str(self.out)]

    def actor(self, address, name):
        return [sys.executable, "-c", STAND_IN, name, str(self.out)]

    def evaluator(self, address):
        return [sys.executable, "-c", STAND_IN, "evaluator", str(self.out)]


class Run:
    """The test's hand in the run: the server's line, what processes do, what the launcher says."""

    def __init__(self, out):
        self.out, self.notes, self.sent, self.statuses, self.connects = out, [], [], [], 0
        self.queue, self.turns, self.play = [], 0, None

    # the line to the server

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def connect(self, timeout_s):
        self.connects += 1
        return {}

    def send(self, kind, /, **fields):
        self.sent.append((kind, fields))

    def receive(self, timeout_s):
        threading.Event().wait(0.01)
        self.turns += 1
        assert self.turns < 2000, "it goes on and on"
        try:
            next(self.play)
        except StopIteration:
            self.end()
            self.play = iter(lambda: None, 0)
        found, self.queue = self.queue, []
        return found

    # the display

    def update(self, status):
        self.statuses.append(status)

    def note(self, text):
        self.notes.append(text)

    # what a test does

    def lives(self, name):
        file = self.out / f"lives_{name}"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def alive(self, name, count):
        """Turns until the process has begun so many lives."""
        while len(self.lives(name)) < count:
            yield

    def do(self, name, what):
        (self.out / f"do_{name}").write_text(f"{what}\n")

    def status(self, **fields):
        self.queue.append(({"type": "status", **fields}, []))

    def end(self):
        (self.out / "books.json").write_text(json.dumps({"status": "completed", "reason": "all is done"}))
        for name in ("server", "learner", "actor0", "evaluator"):
            self.do(name, 0)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "BACKOFF_S", 0.01)
    monkeypatch.setattr(launcher_module, "_TURN_S", 0.02)
    monkeypatch.setattr(launcher_module, "FAILED_S", 2.0)
    monkeypatch.setattr(silence, "LEAST_S", 0.0)
    return Run(tmp_path)


def launch(run, play, heartbeat_s=5.0, **settings):
    run.play = play
    launcher = Launcher(
        commands=StandIns(config=run.out / "config.toml", out=run.out, ranks=1),
        env=os.environ,
        gpus={},
        actors=1,
        display=run,
        interrupts=settings.pop("interrupts", Interrupts()),
        monitor=lambda address: run,
        cleanup=lambda run_id: None,
        heartbeat_s=heartbeat_s,
    )
    outcome = launcher.run()
    assert descendants(os.getpid()) == [], "a process of the run is left"
    return outcome


def test_a_server_and_a_learner_that_are_killed_twice_come_back_and_the_run_completes(run):
    def play():
        for life in (1, 2):
            for name in ("server", "learner"):
                yield from run.alive(name, life)
                run.do(name, -signal.SIGKILL)
                yield from run.alive(name, life + 1)

    outcome = launch(run, play())
    assert (outcome.status, outcome.reason) == ("completed", "all is done")
    assert outcome.restarts == {"server": 2, "learner": 2}
    assert [arguments for _, arguments in run.lives("server")] == [[], ["--recover"], ["--recover"]]
    assert run.sent == [("dead", {"name": "learner0"})] * 2  # nobody has to tell a server that it is dead
    assert len(run.lives("actor0")) == 1
    assert [n for n in run.notes if n.startswith("server was ended by SIGKILL")]


def test_work_forgives_earlier_deaths_so_that_a_run_outlives_any_number_of_them(run):
    def play():
        for life in range(1, 8):
            yield from run.alive("actor0", life)
            run.status(step=life, worked=["actor0"])
            yield
            run.do("actor0", -signal.SIGKILL)
        yield from run.alive("actor0", 8)
        run.status(step=8)
        yield

    outcome = launch(run, play())
    assert (outcome.status, outcome.restarts) == ("completed", {"actor0": 7})
    assert run.statuses[-1]["restarts"] == 7


@pytest.mark.parametrize("name", ["server", "learner", "actor0"])
def test_without_work_the_fourth_life_is_the_last(run, name):
    def play():
        for life in range(1, 5):
            yield from run.alive(name, life)
            run.do(name, "1 ValueError: odd")
        while True:
            yield

    outcome = launch(run, play())
    assert (outcome.status, outcome.restarts) == ("failed", {name: 3})
    assert f"{name} ended with exit code 1: ValueError: odd" in outcome.reason


def test_what_says_why_it_cannot_go_on_is_given_up_unless_the_server_was_away(run):
    def play():
        yield from run.alive("server", 1)
        (run.out / "mute").touch()  # the next one does not bind yet
        run.do("server", -signal.SIGKILL)
        yield from run.alive("server", 2)
        run.do("learner", "1 async-rl: the server has been silent for 60 s")
        yield from run.alive("learner", 2)
        (run.out / "mute").unlink()
        run.do("server", -signal.SIGKILL)
        yield from run.alive("server", 3)
        while json.loads((run.out / "server.json").read_text())["pid"] != run.lives("server")[-1][0]:
            yield
        for _ in range(5):
            yield
        run.do("learner", "75 async-rl: rank 0 has lost the others")
        yield from run.alive("learner", 3)
        run.do("learner", "1 async-rl: no such model")
        while True:
            yield

    outcome = launch(run, play())
    assert outcome.status == "failed"
    assert outcome.reason.startswith("learner ended with exit code 1: no such model")
    assert outcome.restarts == {"server": 2, "learner": 2}


def test_a_server_that_failed_the_run_has_not_died(run):
    def play():
        yield from run.alive("server", 1)
        (run.out / "books.json").write_text(json.dumps({"status": "failed", "reason": "watchdog: nobody works"}))
        for name in ("server", "learner", "actor0", "evaluator"):
            run.do(name, 1)
        while True:
            yield

    outcome = launch(run, play())
    assert (outcome.status, outcome.restarts) == ("failed", {})
    assert outcome.reason.startswith("watchdog: nobody works")


def test_a_frozen_process_is_ended_and_one_that_wakes_up_goes_on(run, monkeypatch):
    def play():
        yield from run.alive("actor0", 1)
        yield from run.alive("learner", 1)
        pid = run.lives("actor0")[0][0]
        os.kill(pid, signal.SIGSTOP)
        while len(run.lives("actor0")) < 2:
            asleep = ["learner0"] if run.turns % 2 else []
            run.status(step=1, silent=["actor0", *asleep, "of another host"])
            yield
        run.status(step=1, silent=[])
        yield

    outcome = launch(run, play(), heartbeat_s=0.25)  # long enough for the server on a busy host
    assert (outcome.status, outcome.restarts) == ("completed", {"actor0": 1})
    assert [n for n in run.notes if "(actor0) lives but has been silent" in n]


def test_a_frozen_server_is_ended_and_comes_back(run):
    def play():
        yield from run.alive("server", 1)
        os.kill(run.lives("server")[0][0], signal.SIGSTOP)
        yield from run.alive("server", 2)  # meanwhile nothing is heard of it
        while json.loads((run.out / "server.json").read_text())["pid"] != run.lives("server")[-1][0]:
            yield

    outcome = launch(run, play(), heartbeat_s=0.05)
    assert (outcome.status, outcome.restarts["server"]) == ("completed", 1)
    assert [n for n in run.notes if n.startswith("server lives but has been silent")]


def test_a_line_that_has_waited_too_long_is_opened_again_and_the_wish_to_stop_repeated(run):
    with Interrupts() as interrupts:

        def play():
            yield from run.alive("server", 1)
            os.kill(os.getpid(), signal.SIGINT)
            while ("stop", {"reason": "asked to stop"}) not in run.sent:
                yield
            raise DeadlineError("the server has been silent for 60 s")

        def listen(play):
            try:
                yield from play
            except DeadlineError as error:
                run.play = iter([None] * 3)
                failed.append(error)
                raise

        failed = []
        outcome = launch(run, listen(play()), interrupts=interrupts)
    assert failed
    assert run.connects == 2
    assert [kind for kind, _ in run.sent].count("stop") == 2
    assert outcome.exit_code in (0, 130)


def test_a_server_that_does_not_come_up_again_is_ended_at_its_deadline(run, monkeypatch):
    def play():
        yield from run.alive("server", 1)
        (run.out / "mute").touch()
        monkeypatch.setattr(server_keeper, "START_S", 0.2)
        run.do("server", -signal.SIGKILL)
        while True:
            yield

    began = time.monotonic()
    outcome = launch(run, play())
    assert (outcome.status, outcome.restarts) == ("failed", {"server": 3})
    assert sum("did not bind its address within" in note for note in run.notes) == 3
    assert time.monotonic() - began < 15


# A rank: writes down its life, then ends as OUT/do_rank<R> says.
RANK = """
import os, sys, threading
from pathlib import Path
out, rank = Path(sys.argv[1]), os.environ["RANK"]
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
(out / f"rank{rank}_{life}").touch()
do = out / f"do_rank{rank}_{life}"
while not (do.exists() and do.read_text()):
    threading.Event().wait(0.02)
code, _, say = do.read_text().partition(" ")
print(say, flush=True)
os._exit(int(code)) if int(code) >= 0 else os.kill(os.getpid(), -int(code))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(StandIns):
    def learner(self, address):
        script = self.out / "rank.py"
        script.write_text(RANK)
        command = Commands.learner(self, address)
        return [*command[: command.index("-m", 2)], str(script), str(self.out)]


def test_torchrun_starts_a_group_again_and_the_launcher_counts_and_ends_what_has_no_hope(run):
    def both(life, what):
        (run.out / f"do_rank1_{life}").write_text(what)
        yield from until(life + 1)

    def until(life):
        while not all((run.out / f"rank{rank}_{life}").exists() for rank in (0, 1)):
            yield

    def play():
        yield from until(1)
        yield from both(1, "-9")
        yield from both(2, "75 async-rl: rank 1 has lost the others")
        (run.out / "do_rank1_3").write_text("1 async-rl: the gradient was not finite")
        while True:
            yield

    run.play = play()
    launcher = Launcher(
        commands=Group(config=run.out / "config.toml", out=run.out, ranks=2),
        env=os.environ,
        gpus={},
        actors=0,
        display=run,
        interrupts=Interrupts(),
        monitor=lambda address: run,
        cleanup=lambda run_id: None,
    )
    outcome = launcher.run()
    assert descendants(os.getpid()) == []
    assert outcome.status == "failed"
    assert outcome.restarts == {"learner": 2}
    assert [note.partition(";")[0] for note in run.notes] == [
        "learner: rank 1 was ended by SIGKILL and starts again",
        "learner: rank 1 ended with exit code 75: rank 1 has lost the others and starts again",
        "learner: rank 1 ended with exit code 1: the gradient was not finite and is given up",
    ]
    assert run.sent[:2] == [("dead", {"name": "learner0"}), ("dead", {"name": "learner1"})]
