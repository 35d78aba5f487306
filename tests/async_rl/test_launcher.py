"""The launcher with small stand-in processes: what happens when each of them ends, and that nothing is left behind."""

import json
import signal

import pytest
from launch_helpers import STAND_IN, Line

from async_rl.launch import launcher as launcher_module
from async_rl.launch import policy, server_keeper
from async_rl.launch.children import tail


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
    assert ran.line.sent == [("dead", {"name": "learner0"}), ("fatal", {"reason": head})]


def test_a_server_that_is_killed_again_and_again_ends_the_run(launch, tmp_path):
    ran = launch(lambda line: (tmp_path / "exit_server").write_text("-9"))
    assert (ran.outcome.status, ran.outcome.exit_code) == ("failed", 1)
    assert ran.outcome.reason.startswith("server was ended by SIGKILL (out of memory?)")
    assert ran.outcome.restarts == {"server": policy.MAX_RESTARTS}


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
    (tmp_path / "books.json").write_text(json.dumps({"status": "completed"}))

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


def test_after_a_stop_what_never_joined_or_was_only_starting_is_ended_without_waiting_for_it(launch, tmp_path):
    def turn(line):
        if line.turns == 2:
            clients = [{"name": "actor0", "role": "actor"}, {"name": "launcher-1", "role": "monitor"}]
            clients.append({"name": "evaluator", "role": "evaluator", "state": "starting"})
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
    assert ran.outcome.restarts == {}  # another life would end the same way


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
    assert ran.outcome.restarts == {}


def test_a_server_that_never_binds_is_given_up_after_its_deadline(launch, monkeypatch):
    monkeypatch.setattr(server_keeper, "START_S", 0.3)
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


def test_a_new_life_frees_what_a_life_that_was_killed_with_its_launcher_has_left(launch, tmp_path):
    (tmp_path / "server.json").write_text(json.dumps({"run_id": "r0"}))
    assert launch(lambda line: line.turns == 2 and line.end_all(0)).cleaned == ["r0", "r1"]
