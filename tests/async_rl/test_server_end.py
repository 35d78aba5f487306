"""How a run ends: in order, on a wish to stop, by a fault, by the watchdog."""

from __future__ import annotations

import json

import pytest
from server_helpers import Cast, config, eventually, exit_code, finish, lines, run_steps, running

from async_rl.client import Stopped
from async_rl.errors import HandshakeError


def test_a_whole_run_ends_with_the_last_evaluation_and_closed_books(cast, server, tmp_path):
    learner, actor, evaluator = cast.learner(), cast.actor(credit=100), cast.join("evaluator", "evaluator")
    monitor = cast.join("monitor", "launcher")
    run_steps(learner, actor, 0, 3)
    learner.send("done")
    assert actor.until("stop")[0]["error"] is False
    assert server.service.ending.phase == "evaluating"
    evaluator.send("eval", version=3, metrics={"accuracy": 1.0}, samples=[])
    assert evaluator.until("stop")[0]["error"] is False
    assert monitor.until("stop")[0]["reason"] == "all steps are trained"
    for peer in (learner, actor, evaluator):
        peer.close()
    assert exit_code(server) == 0
    books = json.loads((tmp_path / "books.json").read_text())
    assert books["status"] == "completed"
    assert books["books"] == {
        "issued": 6, "open": 0, "scoring": 0, "ready": 0, "delivered": 0, "trained": 6, "filtered": 0, "failed": 0,
    }  # fmt: skip
    assert [row["step"] for row in lines(tmp_path / "batches.jsonl")] == [0, 1, 2]


def test_a_step_that_is_called_trained_twice_is_trained_and_announced_once(cast, server, tmp_path):
    learner, actor = cast.learner(), cast.actor(credit=100)
    run_steps(learner, actor, 0, 1)
    first = server.service.ledger.books()["trained"]
    assert learner.train(0)["books"]["trained"] == first
    run_steps(learner, actor, 1, 2)
    assert server.service.versions.count == 3
    assert [row["step"] for row in lines(tmp_path / "batches.jsonl")] == [0, 1]


def test_the_run_does_not_wait_for_an_evaluator_that_leaves(cast, server):
    learner, actor, evaluator = cast.learner(), cast.actor(credit=100), cast.join("evaluator", "evaluator")
    run_steps(learner, actor, 0, 3)
    learner.send("done")
    actor.until("stop")
    for peer in (evaluator, learner, actor):
        peer.close()
    assert exit_code(server) == 0
    assert "the evaluator has left" in server.service.account.reason


def test_a_stop_does_not_wait_for_the_last_evaluation(cast, server):
    learner, actor, evaluator = cast.learner(), cast.actor(credit=100), cast.join("evaluator", "evaluator")
    monitor = cast.join("monitor", "launcher")
    run_steps(learner, actor, 0, 3)
    learner.send("done")
    actor.until("stop")
    monitor.send("stop", reason="Ctrl-C")
    assert learner.until("stop")[0]["error"] is False
    for peer in (evaluator, learner, actor):
        peer.close()
    assert exit_code(server) == 0
    account = server.service.account
    assert account.status == "completed"
    assert account.reason == "all steps are trained; the last evaluation was not waited for: Ctrl-C"


def test_stop_reaches_all_ranks_at_the_same_step_then_a_checkpoint_then_all_end(tmp_path):
    settings = config()
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        zero, one, actor = cast.learner(0, 2), cast.learner(1, 2), cast.actor()
        monitor = cast.join("monitor", "launcher")
        finish(actor, actor.tickets(4))
        zero.request("next", "shard", step=0)
        monitor.send("stop", reason="Ctrl-C")
        eventually(lambda: server.service.ending.phase == "stopping")
        one.request("next", "shard", step=0)  # rank 0 has it: rank 1 must get it, too
        zero.train(0)
        for rank in (one, zero):
            with pytest.raises(Stopped, match="Ctrl-C"):
                rank.request("next", "shard", step=1)
        one.close()
        header, _ = zero.request("snapshot", "snapshot", path=str(tmp_path / "checkpoints" / "step_1"))
        assert header["ok"] is True
        zero.send("done", stopped=True)
        stop, _ = actor.until("stop")
        assert stop["error"] is False
        zero.close()
        actor.close()
        assert exit_code(server) == 0
        assert server.service.account.status == "stopped"


def test_a_fatal_message_ends_the_run_with_its_sentence(cast, server, tmp_path):
    learner, actor = cast.learner(), cast.actor()
    actor.send("fatal", reason="the verifier is broken")
    for peer in (learner, actor):
        stop, _ = peer.until("stop")
        assert (stop["error"], stop["reason"]) == (True, "the verifier is broken")
        peer.close()
    assert exit_code(server) == 1
    assert json.loads((tmp_path / "books.json").read_text())["reason"] == "the verifier is broken"


def test_a_learner_that_dies_does_not_end_the_run_unless_it_stays_away(tmp_path):
    settings = config(learner={"step_deadline_s": 1.0})
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        learner, actor = cast.learner(), cast.actor(credit=8)
        monitor = cast.join("monitor", "launcher")
        tickets = actor.tickets(4)
        learner.close()
        assert monitor.until("status", lambda h: not h["learner"])[0]["status"] == "running"
        finish(actor, tickets)  # what the bound admits goes on
        stop, _ = monitor.until("stop")
        assert stop["error"] is True
        assert stop["reason"].startswith("no learner was connected for 1 s (learner.step_deadline_s) at step 0")


def test_another_life_of_the_learner_takes_the_place_of_the_one_before(cast, server):
    old = cast.learner()
    new = cast.learner(group="second")
    with pytest.raises(HandshakeError, match="another life of the learner group has taken over"):
        old.until("never")
    actor = cast.actor()
    finish(actor, actor.tickets(4))
    assert new.request("next", "shard", step=0)[0]["step"] == 0


def test_the_watchdog_ends_a_run_that_accepts_nothing_with_the_table(tmp_path):
    settings = config(buffer={"watchdog_s": 0.2, "watchdog_rounds": 2})
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        cast.learner()
        actor = cast.actor("lazy", credit=1)
        actor.tickets(1)
        assert actor.until("cancel")[0]["tickets"] == [[0, 0]]
        actor.send("credit", count=1)
        stop, _ = actor.until("stop")
        assert stop["error"] is True
        assert "no group was accepted for 0.2 s, round 2 of 2" in stop["reason"]
        assert "lazy                 ordinal 0 attempt 1 open" in stop["reason"]
        actor.close()


def test_a_learner_that_lives_but_never_ends_its_step_ends_the_run(tmp_path):
    settings = config(learner={"step_deadline_s": 0.6})
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        learner = cast.learner()  # beats go on from its thread
        stop, _ = learner.until("stop")
        assert stop["error"] is True
        assert "the learner made no progress at step 0 for 0.6 s" in stop["reason"]
        assert "ranks: rank 0" in stop["reason"]


def test_a_learner_that_waits_for_data_is_not_taken_for_hung(tmp_path):
    settings = config(learner={"step_deadline_s": 1.0}, buffer={"watchdog_s": 2.0, "watchdog_rounds": 1})
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        learner = cast.learner()
        learner.send("next", step=0)
        stop, _ = learner.until("stop")
        assert "no group was accepted" in stop["reason"]


def test_a_run_that_ends_without_an_evaluator_says_that_the_last_evaluation_is_missing(cast, server):
    learner, actor = cast.learner(), cast.actor(credit=100)
    run_steps(learner, actor, 0, 3)
    learner.send("done")
    stop, _ = learner.until("stop")
    assert (stop["error"], stop["reason"]) == (
        False,
        "all steps are trained; the last evaluation is missing: no evaluator is connected",
    )
