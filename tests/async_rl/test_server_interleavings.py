"""Deaths and silences that fall between two messages, on a server without its socket."""

from __future__ import annotations

import shutil

import pytest
from server_helpers import NUM_TASKS, config
from service_helpers import Bench

from actors.streak import MAX_FAILURES, is_useful
from async_rl.buffer import journal
from async_rl.buffer.ending import FINAL_EVAL_S
from async_rl.errors import HandshakeError
from learner.leader import FINISH_TIMEOUT_S

HEARTBEAT_S = 5.0


def begin(tmp_path, steps=6, **sections):
    """A learner, an actor and an evaluator at the start version, and the launcher's monitor."""
    buffer = {"heartbeat_s": HEARTBEAT_S, **sections.pop("buffer", {})}
    bench = Bench(config(steps=steps, buffer=buffer, **sections), tmp_path)
    bench.learner()
    bench.join("actor", "a")
    bench.live("a", 0)
    bench.join("evaluator", "e")
    bench.join("monitor", "m")
    return bench


def run_step(bench, step):
    bench.submit("a", bench.tickets("a", 2))
    assert bench.shard(step)
    bench.train(step)
    bench.live("a", step + 1)


@pytest.fixture
def evaluating(tmp_path):
    """All steps are trained, the last evaluation is awaited."""
    bench = begin(tmp_path, steps=1)
    run_step(bench, 0)
    bench.say("l", "done", stopped=False)
    assert bench.service.ending.phase == "evaluating"
    bench.inbox.clear()
    return bench


@pytest.mark.parametrize(("role", "name"), [("learner", "l"), ("actor", "a")])
def test_who_dies_after_the_last_step_comes_back_to_a_run_that_is_over_which_is_no_failure(evaluating, role, name):
    evaluating.say("m", "dead", name=name)
    refused = evaluating.join(role, name, pid=2, group="second", step=1)
    assert (refused["type"], refused["code"]) == ("refused", "over")
    assert refused["reason"] == "the run is over: all steps are trained, only the last evaluation is awaited"
    assert HandshakeError(refused["reason"], refused["code"]).exit_code == 0
    evaluating.say("e", "eval", version=1, epoch=0, metrics={"accuracy": 1.0}, samples=[])
    assert evaluating.service.account.status == "completed"


def test_who_comes_to_a_run_that_has_failed_fails(evaluating):
    evaluating.say("a", "fatal", reason="x")
    refused = evaluating.join("actor", "late", pid=2)
    assert (refused["code"], refused["reason"]) == ("hello", "the run is over (failed: x)")
    assert HandshakeError(refused["reason"], refused["code"]).exit_code == 1


@pytest.mark.parametrize(("role", "name"), [("learner", "l"), ("actor", "a")])
def test_who_was_frozen_during_the_last_evaluation_may_come_back_and_hear_of_the_end(evaluating, role, name):
    others = {"l", "a", "e", "m"} - {name}
    evaluating.tick(2 * HEARTBEAT_S, beating=tuple(others))
    assert evaluating.service.account.glance()["silent"] == [name]
    assert evaluating.join(role, name, group="g", step=1)["type"] == "welcome"
    evaluating.say("e", "eval", version=1, epoch=0, metrics={"accuracy": 1.0}, samples=[])
    assert [(h["reason"], h["error"]) for h in evaluating.read(name) if h["type"] == "stop"] == [
        ("all steps are trained", False)
    ]


def test_a_stop_does_not_wait_for_a_learner_that_could_not_be_reached_and_is_dead(tmp_path):
    bench = begin(tmp_path)
    run_step(bench, 0)
    bench.say("m", "stop", reason="Ctrl-C")
    bench.service.unreachable(b"l", bench.now)  # it was killed, and the server had something to tell it
    bench.say("m", "dead", name="l")
    assert (bench.service.ending.phase, bench.service.account.status) == ("closing", "stopped")


def test_colocated_a_learner_that_begins_anew_wakes_nobody_while_its_step_is_complete(tmp_path):
    bench = begin(tmp_path, buffer={"max_staleness": 0}, actors={"placement": "colocated"})
    bench.submit("a", bench.tickets("a", 2))
    bench.say("a", "asleep")
    assert len(bench.shard(0)) == 2
    bench.read("a")
    bench.learner("second", step=0, pid=2)  # the first died while it trained
    assert [h["type"] for h in bench.read("a")] == [], "its device is the learner's"
    assert len(bench.shard(0)) == 2
    bench.train(0)
    assert [h["manifest"]["version"] for h in bench.read("a") if h["type"] == "version"] == [1]


def test_colocated_a_learner_that_begins_anew_without_groups_wakes_the_actors(tmp_path):
    bench = begin(tmp_path, buffer={"max_staleness": 0}, actors={"placement": "colocated"})
    bench.submit("a", bench.tickets("a", 2))
    bench.say("a", "asleep")
    bench.shard(0)
    bench.train(0)
    bench.live("a", 1)
    bench.submit("a", bench.tickets("a", 2))
    bench.say("a", "asleep")
    bench.read("a")
    bench.learner("second", step=0, epoch=1, pid=2)
    assert [h["manifest"]["epoch"] for h in bench.read("a") if h["type"] == "version"] == [1]


def test_a_snapshot_that_is_asked_for_again_is_written_once_and_answered_again(tmp_path, monkeypatch):
    bench = begin(tmp_path)
    saved = []
    save = journal.save
    monkeypatch.setattr(journal, "save", lambda frozen, folder: (saved.append(folder), save(frozen, folder)))
    for _ in range(2):
        bench.join("learner", "l", group="g", step=0)
        bench.say("l", "snapshot", path="checkpoints/.step_0")
    bench.service._learners._writing[-1].future.result(timeout=10)
    bench.tick()
    bench.say("l", "snapshot", path="checkpoints/.step_0")
    answers = [h for h in bench.read("l") if h["type"] == "snapshot"]
    answers += [h for h in bench.say("l", "snapshot", path="checkpoints/.step_0") if h["type"] == "snapshot"]
    assert [(h["path"], h["ok"]) for h in answers][-1] == ("checkpoints/.step_0", True)
    assert len(saved) == 1
    shutil.rmtree(tmp_path / "checkpoints" / ".step_0")  # it could not be moved, and is made anew
    bench.say("l", "snapshot", path="checkpoints/.step_0")
    bench.service._learners.close()
    assert len(saved) == 2


def test_what_actors_still_make_for_a_server_that_has_lost_its_memory_is_late_and_ends_no_run(tmp_path):
    bench = begin(tmp_path, buffer={"groups_per_step": MAX_FAILURES}, task={})
    assert NUM_TASKS >= MAX_FAILURES
    tickets = bench.tickets("a", MAX_FAILURES)
    bench.kill()
    shutil.rmtree(tmp_path / "journal")
    again = Bench(bench.settings, tmp_path, recover=True)
    again.join("actor", "a")
    again.join("actor", "b")
    again.learner("second", step=0, epoch=1, pid=2)
    again.live("b", 0, epoch=1)
    again.tickets("b", 3)
    rows = again.submit("a", tickets)
    assert {(outcome, reason) for _, _, outcome, reason in rows} == {("late", "forgotten")}
    assert not any(is_useful(*row[2:]) for row in rows)
    twice = again.recover()
    twice.join("actor", "a")
    assert twice.submit("a", tickets[-1:])[0][2] == "late", "the next server knows that, too"


def test_forged_tickets_are_refused_by_a_server_that_remembers(tmp_path):
    bench = begin(tmp_path)
    (ticket,) = bench.tickets("a", 1)
    bench.join("actor", "b")
    assert bench.submit("b", [ticket])[0][2:] == ["refused", "held_by_another"]


def test_a_restarted_server_waits_no_longer_for_the_last_evaluation_than_the_learner_does(evaluating):
    clients = ("l", "a", "e", "m")
    evaluating.tick(FINAL_EVAL_S - 20, beating=clients)
    again = evaluating.recover()
    for role, name in (("learner", "l"), ("evaluator", "e")):
        again.join(role, name, group="g", step=1)
    again.tick(15.0, beating=clients)
    assert again.service.ending.phase == "evaluating"
    again.tick(10.0, beating=clients)
    assert (again.service.ending.phase, again.service.account.status) == ("closing", "completed")
    assert FINISH_TIMEOUT_S > FINAL_EVAL_S


def test_who_says_hello_twice_on_one_connection_keeps_its_tickets(tmp_path):
    """A server that died twice in a row finds several hellos of a client that waits for it."""
    bench = begin(tmp_path)
    tickets = bench.tickets("a", 2)
    again = bench.recover()
    again.join("actor", "a")
    again.join("actor", "a")
    again.live("a", 0)
    assert again.submit("a", tickets) == [[t.ordinal, t.attempt, "accepted", ""] for t in tickets]
    assert again.ledger.failed == {}
    assert [t.ordinal for t in again.tickets("a", 2)] == [2, 3], "and its credit counts from then on"
