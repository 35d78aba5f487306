"""The launcher that is interrupted once, twice, or at the wrong moment."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from launch_helpers import STAND_IN, Line

from async_rl.launch import launcher as launcher_module
from async_rl.launch.interrupts import Interrupts


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


def test_a_learner_that_is_killed_after_a_wish_to_stop_makes_no_failure_of_it_and_the_server_is_told_until_it_ends(
    launch, tmp_path, monkeypatch
):
    monkeypatch.setattr(Line, "end_all", lambda *_: None)
    with Interrupts() as interrupts:

        def turn(line):
            line.queue.clear()
            told = line.sent.count(("dead", {"name": "learner0"}))
            if line.turns == 2:
                os.kill(os.getpid(), signal.SIGINT)
                (tmp_path / "exit_learner").write_text("-9")
            if told == 1:  # the server has died with that word and is back
                line.queue.append(({"type": "status", "step": 3}, []))
            if told == 2:
                line.queue.append(({"type": "stop", "reason": "the learner was gone", "error": False}, []))
                for name in ("server", "actor0", "evaluator"):
                    (tmp_path / f"exit_{name}").write_text("0")

        ran = launch(turn, interrupts=interrupts)
    assert (ran.outcome.status, ran.outcome.exit_code) == ("stopped", 130)
    assert ran.outcome.reason == "the learner was gone"
    assert any("learner was ended by SIGKILL" in note for note in ran.display.notes)


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


_INTERRUPTED_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from async_rl.__main__ import main
main()
"""


def test_ctrl_c_is_one_sentence_already_while_the_command_line_is_imported():
    found = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_IMPORT], capture_output=True, text=True, timeout=30, check=False
    )
    assert (found.returncode, found.stderr) == (130, "async-rl: interrupted\n")
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"async-rl": "async_rl.__main__:main"}
