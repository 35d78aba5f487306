"""The launcher with small stand-in processes: what happens when each of them ends, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest

from async_rl.config import BufferConfig, parse_config
from async_rl.errors import ConfigError
from async_rl.launch import launcher as launcher_module
from async_rl.launch import preflight
from async_rl.launch.children import Child, cause, descendants, tail
from async_rl.launch.commands import Commands, assign_gpus, visible_gpus
from async_rl.launch.interrupts import Interrupts
from async_rl.launch.launcher import Launcher, local_address
from async_rl.launch.session import _configure
from async_rl.runfolder import CHECKPOINT_FILES, MODEL_FILES

# Runs until OUT/exit_NAME holds an exit code; the text of OUT/say_NAME is its last word.
STAND_IN = """
import json, os, sys, threading
from pathlib import Path
name, out = sys.argv[1], Path(sys.argv[2])
if name == "server":
    (out / "tmp").write_text(json.dumps({"address": "tcp://127.0.0.1:1", "pid": os.getpid(), "run_id": "r1"}))
    (out / "tmp").rename(out / "server.json")
print(name, "is up", flush=True)
note = out / f"exit_{name}"
while not (note.exists() and note.read_text()):
    threading.Event().wait(0.01)
say = out / f"say_{name}"
if say.exists():
    print(say.read_text(), flush=True)
code = int(note.read_text())
if name.startswith(("actor", "re")):
    note.unlink()
os._exit(code) if code >= 0 else os.kill(os.getpid(), -code)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIns(Commands):
    code: str = STAND_IN

    def server(self):
        return self._stand_in("server")

    def learner(self, address):
        return self._stand_in("learner")

    def actor(self, address, name):
        return self._stand_in(name)

    def scorer(self, address, name, role):
        return self._stand_in(name)

    def evaluator(self, address):
        return self._stand_in("evaluator")

    def _stand_in(self, name):
        return [sys.executable, "-c", self.code, name, str(self.out)]


class Line:
    """Stands in for the client: says what the test queued, turns a stop into the orderly end of every process."""

    def __init__(self, out, on_turn):
        self.out, self.on_turn, self.sent, self.queue, self.turns = out, on_turn, [], [], 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def connect(self, timeout_s):
        return {}

    def send(self, kind, /, **fields):
        self.sent.append((kind, fields))
        if kind in ("stop", "fatal"):
            self.end_all(0 if kind == "stop" else 1)
            self.queue.append(({"type": "stop", "reason": fields["reason"], "error": kind == "fatal"}, []))

    def end_all(self, code):
        for name in ("server", "learner", "actor0", "actor1", "reward0", "reference0", "evaluator"):
            if not (self.out / f"exit_{name}").exists():
                (self.out / f"exit_{name}").write_text(str(code))

    def receive(self, timeout_s):
        threading.Event().wait(min(timeout_s, 0.02))
        self.turns += 1
        self.on_turn(self)
        found, self.queue = self.queue, []
        return found


class Silent:
    def __init__(self):
        self.notes, self.steps = [], []

    def update(self, status):
        self.steps.append(status["step"])

    def note(self, text):
        self.notes.append(text)


@dataclass
class Ran:
    outcome: object
    line: Line
    display: Silent
    launcher: Launcher
    cleaned: list
    seconds: float


@pytest.fixture
def launch(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher_module, "BACKOFF_S", 0.01)
    monkeypatch.setattr(launcher_module, "_TURN_S", 0.05)

    def run(on_turn, *, actors=1, scorers=None, code=STAND_IN, interrupts=None):
        line, display, cleaned = Line(tmp_path, on_turn), Silent(), []
        launcher = Launcher(
            commands=StandIns(config=tmp_path / "config.toml", out=tmp_path, ranks=1, code=code),
            env=os.environ,
            gpus={},
            actors=actors,
            scorers=scorers or {},
            display=display,
            interrupts=interrupts or Interrupts(),
            monitor=lambda address: line,
            cleanup=cleaned.append,
        )
        began = time.monotonic()
        outcome = launcher.run()
        assert descendants(os.getpid()) == [], "a process of the run is left"
        return Ran(outcome, line, display, launcher, cleaned, time.monotonic() - began)

    return run


def test_a_run_whose_learner_and_server_end_well_is_completed(launch):
    def turn(line):
        if line.turns == 3:
            line.queue.append(({"type": "status", "step": 7}, []))
        if line.turns == 5:
            line.queue.append(({"type": "stop", "reason": "all steps are done", "error": False}, []))
            line.end_all(0)

    ran = launch(turn, actors=2)
    assert (ran.outcome.status, ran.outcome.exit_code) == ("completed", 0)
    assert ran.outcome.reason == "all steps are done"
    assert ran.display.steps == [7]
    assert ran.cleaned == ["r1"]
    assert set(ran.outcome.cpu_s) == {"server", "learner", "actor0", "actor1", "evaluator"}
    assert all(0 < seconds < 10 for seconds in ran.outcome.cpu_s.values())
    assert ran.outcome.restarts == {}


def test_a_learner_that_dies_ends_the_run_with_its_own_words_and_the_end_of_its_log(launch, tmp_path):
    def turn(line):
        if line.turns == 2:
            (tmp_path / "say_learner").write_text("Traceback ...\nasync-rl: rank 1 has another model")
            (tmp_path / "exit_learner").write_text("1")

    ran = launch(turn)
    assert (ran.outcome.status, ran.outcome.exit_code) == ("failed", 1)
    head, *rest = ran.outcome.reason.splitlines()
    assert head == "learner ended with exit code 1: rank 1 has another model"
    assert "  learner is up" in rest
    assert ran.line.sent == [("fatal", {"reason": head})]


def test_a_server_that_is_killed_ends_the_run(launch, tmp_path):
    ran = launch(lambda line: (tmp_path / "exit_server").write_text("-9"))
    assert (ran.outcome.status, ran.outcome.exit_code) == ("failed", 1)
    assert ran.outcome.reason.startswith("server was ended by SIGKILL (out of memory?)")


def test_an_actor_that_is_killed_is_reported_and_started_again(launch, tmp_path):
    def turn(line):
        if line.turns == 2:
            (tmp_path / "exit_actor1").write_text("-9")
        if (tmp_path / "logs/actor1.log").read_text().count("is up") == 2:
            line.end_all(0)

    ran = launch(turn, actors=2)
    assert ran.outcome.status == "completed"
    assert ran.line.sent == [("dead", {"name": "actor1"})]
    assert ran.outcome.restarts == {"actor1": 1}
    assert "actor1 was ended by SIGKILL" in ran.display.notes[0]


def test_an_actor_that_leaves_on_purpose_is_not_started_again(launch, tmp_path):
    def turn(line):
        if line.turns == 2:
            (tmp_path / "exit_actor0").write_text("0")
        if line.turns == 15:
            line.end_all(0)

    ran = launch(turn)
    assert (ran.outcome.status, ran.outcome.restarts, ran.line.sent) == ("completed", {}, [])


@pytest.mark.parametrize(("step", "restarts"), [(3, {"actor0": 1}), (9, {})])
def test_an_actor_that_leaves_while_there_are_steps_to_train_is_started_again(launch, tmp_path, step, restarts):
    (tmp_path / "books.json").write_text(json.dumps({"status": "running", "step": step, "steps": 9}))

    def turn(line):
        if line.turns == 2:
            (tmp_path / "exit_actor0").write_text("0")
        if line.turns == 15:
            line.end_all(0)

    ran = launch(turn)
    assert ran.outcome.restarts == restarts
    assert ran.line.sent == [("dead", {"name": "actor0"})] * len(restarts)
    assert ran.display.notes == [n for n in ran.display.notes if "actor0 ended with exit code 0 and starts again" in n]


def test_a_run_that_the_server_calls_stopped_is_stopped(launch, tmp_path):
    (tmp_path / "books.json").write_text('{"status": "stopped"}')
    assert launch(lambda line: line.turns == 2 and line.end_all(0)).outcome.status == "stopped"


def test_the_servers_reason_comes_with_the_learners_traceback(launch, tmp_path):
    def turn(line):
        if line.turns == 2:
            (tmp_path / "say_learner").write_text("Traceback (most recent call last):\nValueError: odd")
            line.queue.append(({"type": "stop", "reason": "learner0: odd", "error": True}, []))
            line.end_all(1)

    reason = launch(turn).outcome.reason
    assert reason.startswith("learner0: odd\nlast lines of ")
    assert reason.endswith("  ValueError: odd")


def test_a_learner_that_was_only_starting_when_the_run_was_stopped_is_no_failure(launch, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher_module, "FAILED_S", 0.2)

    def turn(line):
        if line.turns == 2:
            (tmp_path / "books.json").write_text('{"status": "stopped"}')
            line.queue.append(({"type": "stop", "reason": "asked to stop", "error": False}, []))
            (tmp_path / "exit_server").write_text("0")

    ran = launch(turn)
    assert (ran.outcome.status, ran.outcome.reason) == ("stopped", "asked to stop")
    assert "learner" in ran.display.notes[0]


def test_after_a_stop_what_never_joined_is_ended_without_waiting_for_it(launch, tmp_path):
    def turn(line):
        if line.turns == 2:
            clients = [{"name": "actor0", "role": "actor"}, {"name": "launcher-1", "role": "monitor"}]
            (tmp_path / "books.json").write_text(json.dumps({"status": "stopped", "clients": clients}))
            line.queue.append(({"type": "stop", "reason": "asked to stop", "error": False}, []))
            (tmp_path / "exit_server").write_text("0")
            (tmp_path / "exit_actor0").write_text("0")

    ran = launch(turn)
    assert ran.outcome.status == "stopped"
    assert ran.seconds < launcher_module.FAILED_S / 2
    codes = {child.name: child.exit_code for child in ran.launcher.children}
    assert codes == {"server": 0, "actor0": 0, "learner": -signal.SIGTERM, "evaluator": -signal.SIGTERM}


@pytest.mark.parametrize(("joined", "status"), [(False, "stopped"), (True, "failed")])
def test_a_learner_that_is_sent_away_because_the_run_is_over_is_no_failure(launch, tmp_path, joined, status):
    def turn(line):
        if line.turns == 2:
            clients = [{"name": "learner0", "role": "learner"}] if joined else []
            (tmp_path / "books.json").write_text(json.dumps({"status": "stopped", "clients": clients}))
            line.queue.append(({"type": "stop", "reason": "asked to stop", "error": False}, []))
            (tmp_path / "exit_learner").write_text("1")
        if line.turns == 40:
            line.end_all(0)

    assert launch(turn).outcome.status == status


def test_a_rank_that_was_killed_is_named_with_its_signal_instead_of_the_backends_words(launch, tmp_path):
    report = (
        "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: Connection reset by peer\n"
        "E1129 16:46:26.243000 22981 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) "
        "local_rank: 1 (pid: 23151) of binary: python3\nTraceback (most recent call last):\n  ChildFailedError:\n"
        "====\nlearner.main FAILED\n----\n  traceback : Signal 9 (SIGKILL) received\n====\nafter the report"
    )

    def turn(line):
        if line.turns == 2:
            (tmp_path / "say_learner").write_text(report)
            line.queue.append(({"type": "stop", "reason": "learner0: rank 0 has lost the others", "error": True}, []))
            line.end_all(1)

    ran = launch(turn)
    assert ran.outcome.reason == "learner0: rank 0 has lost the others; rank 1 was ended by SIGKILL"
    assert tail(tmp_path / "logs/learner.log", 2)[1] == "after the report"
    assert "FAILED" not in "\n".join(tail(tmp_path / "logs/learner.log", 99))


def test_when_the_last_actor_is_given_up_the_run_fails_and_says_why(launch, tmp_path):
    (tmp_path / "say_actor0").write_text("async-rl: no such verifier")

    def turn(line):
        (tmp_path / "exit_actor0").write_text("1")

    ran = launch(turn)
    assert (ran.outcome.status, ran.outcome.exit_code) == ("failed", 1)
    assert ran.outcome.reason.startswith("no actor is left; actor0 ended with exit code 1: no such verifier")
    assert ran.outcome.restarts == {"actor0": launcher_module.MAX_RESTARTS}


def test_scorers_are_started_and_a_killed_one_is_reported_and_started_again(launch, tmp_path):
    def turn(line):
        if line.turns == 2:
            (tmp_path / "exit_reward0").write_text("-9")
        if (tmp_path / "logs/reward0.log").read_text().count("is up") == 2:
            line.end_all(0)

    ran = launch(turn, scorers={"reward": 1, "reference": 1})
    assert ran.outcome.status == "completed"
    assert ran.line.sent == [("dead", {"name": "reward0"})]
    assert ran.outcome.restarts == {"reward0": 1}
    assert {"reward0", "reference0", "actor0"} <= set(ran.outcome.cpu_s)


def test_when_the_last_scorer_of_a_stage_is_given_up_the_run_fails_though_other_workers_live(launch, tmp_path):
    (tmp_path / "say_reference0").write_text("async-rl: no such teacher")

    def turn(line):
        (tmp_path / "exit_reference0").write_text("1")

    ran = launch(turn, scorers={"reward": 1, "reference": 1})
    assert (ran.outcome.status, ran.outcome.exit_code) == ("failed", 1)
    reason = "no reference scorer is left; reference0 ended with exit code 1: no such teacher"
    assert ran.outcome.reason.startswith(reason)
    assert ran.outcome.restarts == {"reference0": launcher_module.MAX_RESTARTS}


def test_the_first_interrupt_asks_the_server_to_stop_and_the_run_counts_as_stopped(launch):
    with Interrupts() as interrupts:

        def turn(line):
            if line.turns == 2:
                os.kill(os.getpid(), signal.SIGINT)

        ran = launch(turn, interrupts=interrupts)
    assert (ran.outcome.status, ran.outcome.exit_code) == ("stopped", 130)
    assert [kind for kind, _ in ran.line.sent] == ["stop"]


def test_an_interrupt_during_the_last_evaluation_does_not_turn_a_completed_run_into_a_stopped_one(launch, tmp_path):
    with Interrupts() as interrupts:

        def turn(line):
            if line.turns == 2:
                (tmp_path / "books.json").write_text('{"status": "completed"}')
                os.kill(os.getpid(), signal.SIGINT)

        ran = launch(turn, interrupts=interrupts)
    assert (ran.outcome.status, ran.outcome.exit_code) == ("completed", 0)


def test_sigterm_is_like_the_first_interrupt_with_its_own_exit_code(launch):
    with Interrupts() as interrupts:
        ran = launch(lambda line: line.turns == 2 and os.kill(os.getpid(), signal.SIGTERM), interrupts=interrupts)
    assert (ran.outcome.status, ran.outcome.exit_code) == ("stopped", 143)


def test_an_error_after_a_wish_to_stop_is_not_waited_for_as_long_as_a_checkpoint(launch, monkeypatch):
    monkeypatch.setattr(launcher_module, "FAILED_S", 0.3)
    monkeypatch.setattr(Line, "end_all", lambda *_: None)  # nobody leaves by itself
    with Interrupts() as interrupts:

        def turn(line):
            assert line.turns < 300, "it still waits"
            line.queue.clear()
            if line.turns == 2:
                os.kill(os.getpid(), signal.SIGINT)
            if line.turns == 4:
                line.queue.append(({"type": "stop", "reason": "nobody holds a ticket", "error": True}, []))

        ran = launch(turn, interrupts=interrupts)
    assert (ran.outcome.status, ran.outcome.reason) == ("failed", "nobody holds a ticket")


def test_the_second_interrupt_kills_even_what_ignores_signals(launch, tmp_path, monkeypatch):
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAND_IN
    monkeypatch.setattr(Line, "end_all", lambda *_: None)
    with Interrupts() as interrupts:
        asked = []

        def turn(line):
            line.queue.clear()
            # once they say that they are up, they ignore SIGTERM
            logs = [log.read_text() for log in (tmp_path / "logs").glob("*.log")]
            if len(asked) < 2 and len(logs) == 4 and all("is up" in text for text in logs):
                asked.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGINT)

        ran = launch(turn, code=stubborn, interrupts=interrupts)
        ended = time.monotonic()
    assert ran.outcome.status == "stopped"
    assert ended - asked[0] < 3.5
    assert all(child.exit_code == -signal.SIGKILL for child in ran.launcher.children)


def test_a_server_that_never_binds_is_given_up_after_its_deadline(launch, monkeypatch):
    monkeypatch.setattr(launcher_module, "SERVER_START_S", 0.3)
    ran = launch(lambda line: None, code="import threading; threading.Event().wait(60)")
    assert ran.outcome.status == "failed"
    assert "did not bind its address" in ran.outcome.reason


def test_a_server_that_cannot_start_fails_the_run_with_its_sentence(launch):
    ran = launch(lambda line: None, code="print('async-rl: the port is taken'); raise SystemExit(1)")
    assert ran.outcome.reason.startswith("server ended with exit code 1: the port is taken")


def test_grandchildren_in_their_own_session_do_not_survive(launch, tmp_path):
    spawn = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)\n" + STAND_IN
    ran = launch(lambda line: line.turns == 2 and line.end_all(0), code=spawn)  # the fixture looks for what is left
    assert ran.outcome.status == "completed"


def test_a_run_that_does_not_wind_down_is_ended_at_the_deadline(launch, monkeypatch):
    monkeypatch.setattr(launcher_module, "FAILED_S", 0.2)
    monkeypatch.setattr(Line, "end_all", lambda *_: None)
    stop = ({"type": "stop", "reason": "the watchdog ended the run", "error": True}, [])
    ran = launch(lambda line: line.turns == 2 and line.queue.append(stop))
    assert (ran.outcome.status, ran.outcome.reason) == ("failed", "the watchdog ended the run")


def test_children_die_with_a_launcher_that_is_killed(tmp_path):
    code = (
        "import sys, os, threading; from pathlib import Path; from async_rl.launch.children import Child\n"
        "child = Child.start('c', ['sleep', '60'], Path(sys.argv[1]) / 'c.log', os.environ)\n"
        "print(child.pid, flush=True); threading.Event().wait(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    handle = os.pidfd_open(pid)
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    import select

    assert select.select([handle], [], [], 5.0)[0], "the child outlived its parent"
    os.close(handle)


def test_a_child_reports_cpu_time_and_signal(tmp_path):
    code = "sum(i * i for i in range(3_000_000)); import os; os.kill(os.getpid(), 15)"
    child = Child.start("c", [sys.executable, "-c", code], tmp_path / "c.log", os.environ)
    assert launcher_module.wait_all([child], 20.0) == []
    assert child.exit_code == -signal.SIGTERM
    assert 0.05 < child.cpu_s < 15
    assert child.describe_end() == "was ended by SIGTERM"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; print('async-rl: no such verifier'); sys.exit(1)", "no such verifier"),
        ("import sys; sys.exit(1)", None),
        ("import os; print('ConnectionResetError: of another', flush=True); os.kill(os.getpid(), 9)", None),
    ],
)
def test_a_cause_is_what_this_life_said_itself_and_not_an_earlier_one_or_one_that_was_killed(tmp_path, code, why):
    log = tmp_path / "c.log"
    log.write_text(
        "async-rl: of an earlier life\ntorch/distributed/elastic/x.py:1] failed (exitcode: -9) local_rank: 1\n"
    )
    child = Child.start("c", [sys.executable, "-c", code], log, os.environ)
    assert launcher_module.wait_all([child], 20.0) == []
    assert child.cause() == why
    assert child.killed_rank() is None
    assert "async-rl: of an earlier life" not in child.tail()


def test_the_cause_is_our_sentence_before_torchruns_noise(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "step 1\n[rank0]:async-rl: the gradient was not finite\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\nexitcode : 1\n"
    )
    assert cause(log) == "the gradient was not finite"
    log.write_text("Traceback (most recent call last):\n  File x\nRuntimeError: out of slots\n")
    assert cause(log) == "RuntimeError: out of slots"
    log.write_text("all is well\n")
    assert cause(log) is None
    assert tail(log, 3) == ["all is well"]
    assert tail(tmp_path / "missing", 3) == []


def test_commands_name_module_config_and_place():
    from pathlib import Path

    commands = Commands(config=Path("r/config.toml"), out=Path("r"), ranks=2, resume=Path("r/checkpoints/step_5"))
    python = sys.executable
    resume = ["--resume", "r/checkpoints/step_5"]
    assert commands.server() == [python, "-m", "async_rl.buffer.server", "r/config.toml", "--out", "r", *resume]
    assert commands.learner("tcp://h:1") == [
        *[python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        *["--log-dir", "r/logs/torchrun", "-m", "learner.main"],
        *["r/config.toml", "--out", "r", "--connect", "tcp://h:1", *resume],
    ]
    alone = Commands(config=Path("r/config.toml"), out=Path("r"), ranks=1).learner("tcp://h:1")
    assert alone[:3] == [python, "-m", "learner.main"]  # needs no torchrun
    assert commands.actor("tcp://h:1", "actor0")[1:] == [
        *["-m", "actors.main", "r/config.toml", "--connect", "tcp://h:1", "--name", "actor0"]
    ]
    assert commands.scorer("tcp://h:1", "reward1", "reward")[1:] == [
        *[
            "-m",
            "actors.scorers.main",
            "r/config.toml",
            "--role",
            "reward",
            "--connect",
            "tcp://h:1",
            "--name",
            "reward1",
        ]
    ]
    assert commands.evaluator("tcp://h:1")[1:] == [
        "-m",
        "actors.evaluation.main",
        "r/config.toml",
        "--connect",
        "tcp://h:1",
    ]


def test_gpus_go_to_the_learner_first_and_actors_share_the_rest():
    assert assign_gpus([], 1, 2) == {}
    assert assign_gpus(["0", "1", "2"], 1, 3) == {
        "learner": "0",
        "actor0": "1",
        "actor1": "2",
        "actor2": "1",
        "evaluator": "1",
    }
    assert assign_gpus(["0"], 1, 1) == {"learner": "0", "actor0": "0", "evaluator": "0"}
    scored = assign_gpus(["0", "1", "2", "3"], 1, 2, ["reference0", "reference1"])
    assert (scored["actor1"], scored["reference0"], scored["reference1"]) == ("2", "3", "1")
    turns = assign_gpus(["0", "1"], 1, 1, ["reference0"], colocated=True)
    assert turns == {"learner": "0", "actor0": "0", "evaluator": "0", "reference0": "1"}
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 1"}) == ["3", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []


@pytest.mark.parametrize(
    ("bound", "local"),
    [
        ("tcp://0.0.0.0:55", "tcp://127.0.0.1:55"),
        ("tcp://[::]:55", "tcp://[::1]:55"),
        ("tcp://10.0.0.5:55", "tcp://10.0.0.5:55"),
    ],
)
def test_clients_on_this_host_use_the_loopback_when_the_server_listens_everywhere(bound, local):
    assert local_address(bound) == local


# ------------------------------------------------------------------ before anything starts


def test_a_folder_with_files_is_refused_and_an_empty_one_taken(tmp_path):
    assert preflight.prepare_out(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").touch()
    with pytest.raises(ConfigError, match=r"not empty.*--resume"):
        preflight.prepare_out(tmp_path / "used")
    with pytest.raises(ConfigError, match="a file of this name"):
        preflight.prepare_out(tmp_path / "used" / "x")


def test_a_port_that_is_taken_is_named_before_a_process_starts():
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(ConfigError, match=r"buffer.bind.*in use.*another port"):
            preflight.check_address(BufferConfig(bind=f"tcp://127.0.0.1:{holder.getsockname()[1]}"))


def test_addresses_that_others_can_reach_need_consent():
    preflight.check_address(BufferConfig(bind="tcp://127.0.0.1:*"))
    preflight.check_address(BufferConfig(bind="tcp://0.0.0.0:*", insecure=True))
    with pytest.raises(ConfigError, match="insecure"):
        preflight.check_address(BufferConfig(bind="tcp://0.0.0.0:*"))
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        preflight.check_address(BufferConfig(bind="127.0.0.1:80"))
    with pytest.raises(ConfigError, match="as the learner host printed it"):
        preflight.check_connect("tcp://*:80", "")


def test_a_verifier_is_imported_in_another_process_and_its_fault_named(tmp_path):
    (tmp_path / "mine.py").write_text("def score(prompts, completions):\n    return []\nnumber = 3\n")
    env = preflight.child_environment(os.environ, tmp_path)
    preflight.check_verifier("mine:score", env)
    for spec, fault in {
        "mine": "module:function",
        "mine:missing": "AttributeError",
        "mine:number": "number is no function",
        "absent:score": "No module named 'absent'",
    }.items():
        with pytest.raises(ConfigError, match=fault):
            preflight.check_verifier(spec, env)


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({}, "no config.json"),
        ({"config.json": "{}"}, "safetensors"),
        ({"config.json": "{}", "m.safetensors": ""}, "tokenizer"),
        ({"config.json": "{}", "m.safetensors": "", "tokenizer.json": ""}, "names no architecture"),
        (
            {"config.json": '{"architectures": ["BertModel"]}', "m.safetensors": "", "tokenizer.json": ""},
            "no causal language model",
        ),
    ],
)
def test_a_model_folder_is_checked_before_it_is_loaded(tmp_path, files, fault):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=fault):
        preflight.check_model_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"eos_token_id": None}, "has an eos_token_id; add one"),
        ({"vocab_size": None}, "vocab_size = None"),
        ({"n_positions": None}, "max_position_embeddings = None"),
        ({"n_positions": 16}, "reads at most 16 tokens"),
    ],
)
def test_what_a_run_reads_from_the_models_configuration_is_checked_first(tmp_path, change, fault):
    # the names of GPT-2
    model = {"architectures": ["GPT2LMHeadModel"], "eos_token_id": 2, "vocab_size": 128, "n_positions": 17}
    for name in ("m.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("")
    (tmp_path / "config.json").write_text(json.dumps(model))
    preflight.check_model_folder(tmp_path)
    preflight.check_limits(parse_config({}), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model | change))
    with pytest.raises(ConfigError, match=fault):
        preflight.check_limits(parse_config({}), tmp_path)


def test_what_the_user_has_set_in_the_environment_stays(tmp_path):
    env = preflight.child_environment({"OMP_NUM_THREADS": "7", "PYTHONPATH": "/x"}, tmp_path)
    assert (env["OMP_NUM_THREADS"], env["OMP_WAIT_POLICY"], env["HF_HUB_OFFLINE"]) == ("7", "PASSIVE", "1")
    assert env["PYTHONPATH"] == os.pathsep.join([os.getcwd(), str(tmp_path), "/x"])


def test_a_run_that_still_goes_on_cannot_be_resumed_beside_itself(tmp_path):
    (tmp_path / "config.toml").write_text("")
    arguments = ["-m", "async_rl.buffer.server", str(tmp_path / "config.toml")]
    code = "import sys; print(1, flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=pipe, stdout=pipe) as server:
        assert server.stdout.readline()
        (tmp_path / "server.json").write_text(json.dumps({"pid": server.pid}))
        with pytest.raises(ConfigError, match=f"its run still goes on .server process {server.pid}."):
            _configure(None, [], None, tmp_path)
        server.stdin.close()
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        _configure(None, [], None, tmp_path)


def test_a_new_life_frees_what_a_life_that_was_killed_with_its_launcher_has_left(launch, tmp_path):
    (tmp_path / "server.json").write_text(json.dumps({"run_id": "r0"}))
    assert launch(lambda line: line.turns == 2 and line.end_all(0)).cleaned == ["r0", "r1"]


def test_resume_needs_a_complete_checkpoint_and_the_same_contract(tmp_path):
    from async_rl.config import parse_config, to_toml

    config = parse_config({"steps": 10})
    with pytest.raises(ConfigError, match="no run folder"):
        _configure(None, [], None, tmp_path)
    (tmp_path / "config.toml").write_text(to_toml(config))
    model = MODEL_FILES[0]
    for step, names in {4: (*CHECKPOINT_FILES, model), 8: (*CHECKPOINT_FILES[1:], model), 9: CHECKPOINT_FILES}.items():
        folder = tmp_path / "checkpoints" / f"step_{step}"
        (folder / "hf").mkdir(parents=True)
        for name in names:
            (folder / name).write_text(json.dumps({}))
    resumed, folder, checkpoint = _configure(None, ["steps=12"], None, tmp_path)
    assert (resumed.steps, folder, checkpoint) == (12, tmp_path, tmp_path / "checkpoints" / "step_4")
    with pytest.raises(ConfigError, match="must stay as in"):
        _configure(None, ["seed=1"], None, tmp_path)
    with pytest.raises(ConfigError, match="all 4 steps are done"):
        _configure(None, ["steps=4"], None, tmp_path)
    with pytest.raises(ConfigError, match="leave --out away"):
        _configure(None, [], tmp_path / "other", tmp_path)
    (tmp_path / "server.json").write_text(json.dumps({"pid": os.getpid()}))  # a number that another program has now
    assert _configure(None, [], None, tmp_path)[1] == tmp_path
    (tmp_path / "checkpoints/step_4/hf/model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match=r"step_4/hf/model\.safetensors is no safetensors file"):
        _configure(None, [], None, tmp_path)
