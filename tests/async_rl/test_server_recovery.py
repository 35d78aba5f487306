"""A server that takes over from one that died, and a learner that begins again at an earlier step."""

from __future__ import annotations

import pytest
from recovery_helpers import HEARTBEAT_S, closes, kinds, run_step, started
from server_helpers import config, lines, manifest
from service_helpers import Bench

from async_rl.buffer.reception import REJOIN_PERIODS
from async_rl.config import Config


@pytest.fixture
def settings() -> Config:
    return config(steps=6, buffer={"heartbeat_s": HEARTBEAT_S})


@pytest.fixture
def bench(settings, tmp_path) -> Bench:
    return started(settings, tmp_path)


def _manifest(version, epoch):
    return manifest(version, epoch).to_wire()


# ---------------------------------------------------------------- a new life of the learner


def test_a_learner_that_begins_at_an_earlier_step_takes_the_run_back_there(bench, tmp_path):
    for step in range(3):
        run_step(bench, step)
        bench.join("evaluator", "e")
        bench.say("e", "eval", version=step + 1, epoch=0, metrics={"accuracy": 0.5}, samples=[])
    (held,) = bench.tickets("a", 1)
    bench.read("a")
    welcome = bench.join("learner", "l", group="second", step=1, pid=2)
    assert (welcome["type"], welcome["next_step"], welcome["epoch"]) == ("welcome", 1, 1)
    assert next(h for h in bench.read("a") if h["type"] == "cancel")["tickets"] == [[held.ordinal, held.attempt]]
    assert [row["step"] for row in lines(tmp_path / "batches.jsonl")] == [0]
    assert [row["version"] for row in lines(tmp_path / "evals.jsonl")] == [1]
    assert (bench.ledger.version, bench.ledger.next_step, bench.ledger.books()["trained"]) == (1, 1, 2)
    assert bench.ledger.failed["learner_restarted"] == 5, "two steps of two groups, and the open ticket"
    assert closes(bench.ledger)


def test_no_tickets_go_to_an_actor_with_a_void_version_until_it_has_one_of_the_new_epoch(bench):
    for step in range(3):
        run_step(bench, step)
    assert bench.join("learner", "l", group="second", step=1, pid=2)["epoch"] == 1
    assert bench.join("actor", "late")["manifest"] is None, "no version of the new life is published yet"
    assert bench.tickets("a", 4) == []
    assert bench.live("a", 3, epoch=0) == []
    assert bench.tickets("a", 4) == []
    refused = bench.say("l", "trained", step=-1, manifest=_manifest(1, 0), stats={})
    assert [h["code"] for h in refused] == ["bad_manifest"]
    bench.say("l", "trained", step=-1, manifest=_manifest(1, 1), stats={})
    assert [h["manifest"]["epoch"] for h in bench.read("a") if h["type"] == "version"] == [1]
    bench.read("a")
    headers = bench.live("a", 1, epoch=1)
    assert [t[:2] for h in headers if h["type"] == "tickets" for t in h["tickets"]] == [[2, 1], [3, 1], [4, 1], [5, 1]]
    assert bench.service.versions.mismatches == 0, "a void version is no false claim"


def test_tickets_of_an_actor_that_commits_a_void_version_after_the_rewind_are_taken_back(bench):
    for step in range(3):
        run_step(bench, step)
    bench.join("actor", "slow")
    bench.live("slow", 1)  # it has not followed
    bench.learner("second", step=1, epoch=1, pid=2)
    tickets = bench.tickets("slow", 1)
    cancel = bench.live("slow", 3, epoch=0)  # it was on its way to a version that is void
    assert [h["tickets"] for h in cancel if h["type"] == "cancel"] == [[[tickets[0].ordinal, tickets[0].attempt]]]
    assert bench.submit("slow", tickets)[0][2:] == ["late", "void_version"]
    assert closes(bench.ledger)


def test_an_evaluation_of_a_void_version_counts_nothing_and_a_repeated_one_counts_once(bench, tmp_path):
    for step in range(3):
        run_step(bench, step)
    bench.join("evaluator", "e")
    bench.learner("second", step=1, epoch=1, pid=2)
    bench.say("e", "eval", version=3, epoch=0, metrics={"accuracy": 0.1}, samples=[])
    assert bench.service.account.evals == []
    for _ in range(2):
        bench.say("e", "eval", version=1, epoch=0, metrics={"accuracy": 0.2}, samples=[])
    bench.live("a", 1, epoch=1)
    run_step(bench, 1, epoch=1)
    bench.say("e", "eval", version=2, epoch=1, metrics={"accuracy": 0.3}, samples=[])
    assert [row["metrics"]["accuracy"] for row in lines(tmp_path / "evals.jsonl")] == [0.2, 0.3]


def test_a_rank_of_the_same_group_that_says_hello_again_changes_nothing(bench):
    run_step(bench, 0)
    tickets = bench.tickets("a", 4)
    bench.submit("a", tickets[:2])
    shard = bench.shard(1)
    before = bench.ledger.books()
    welcome = bench.join("learner", "l", group="g", step=2)
    assert (welcome["next_step"], welcome["epoch"]) == (1, 0)
    assert bench.shard(1) == shard
    assert bench.ledger.books() == before


def test_a_group_that_restarts_at_the_newest_version_loses_nothing(bench):
    run_step(bench, 0)
    tickets = bench.tickets("a", 4)
    bench.submit("a", tickets[:2])
    shard = bench.shard(1)
    welcome = bench.learner("second", step=1, pid=2)
    assert (welcome["next_step"], welcome["epoch"]) == (1, 0)
    assert bench.shard(1) == shard
    assert bench.submit("a", tickets[2:])[0][2] == "accepted", "open tickets stay"


def test_a_learner_that_is_ahead_is_refused_and_so_is_one_that_was_replaced(bench):
    run_step(bench, 0)
    ahead = bench.join("learner", "l", group="second", step=2, pid=2)
    assert (ahead["type"], ahead["code"]) == ("refused", "ahead")
    assert "continues with step 2, the server with step 1" in ahead["reason"]
    assert bench.join("learner", "l", group="third", step=1, pid=3)["type"] == "welcome"
    zombie = bench.join("learner", "l0", group="g", step=1)
    assert (zombie["type"], zombie["code"]) == ("refused", "replaced")


def test_a_new_group_may_have_another_number_of_ranks(bench):
    run_step(bench, 0)
    for rank in range(2):
        welcome = bench.join("learner", f"r{rank}", group="second", step=1, rank=rank, world=2, pid=2)
        assert welcome["type"] == "welcome"
    bench.submit("a", bench.tickets("a", 2))
    assert sorted(bench.shard(1, "r0") + bench.shard(1, "r1")) == [(2, 0), (3, 0)]


# ---------------------------------------------------------------- a restart of the server


def test_a_restarted_server_lets_everybody_go_on(bench, tmp_path):
    run_step(bench, 0)
    tickets = bench.tickets("a", 4)
    bench.submit("a", tickets[:2])
    shard = bench.shard(1)
    books = bench.ledger.books()
    again = bench.recover()
    assert again.ledger.books() == books
    assert again.weights.served == [1]
    assert [h["code"] for h in again.say("a", "beat")] == ["hello_first"]
    welcome = again.join("actor", "a")
    assert (welcome["next_step"], welcome["manifest"]["version"], welcome["life"]) == (1, 1, 0)
    again.live("a", 1)
    assert again.submit("a", tickets[2:])[0][2] == "accepted", "its tickets are still its own"
    assert again.submit("a", tickets[:1])[0][2:] == ["accepted", ""], "a repeated group gets the same answer"
    assert again.join("learner", "l", group="g", step=2)["epoch"] == 0
    assert again.shard(1) == shard
    again.train(1)
    assert [row["step"] for row in lines(tmp_path / "batches.jsonl")] == [0, 1]
    assert closes(again.ledger)


def test_a_step_whose_answer_was_lost_with_the_server_is_trained_and_announced_once(bench, tmp_path):
    run_step(bench, 0)
    bench.submit("a", bench.tickets("a", 2))
    bench.shard(1)
    bench.train(1)
    again = bench.recover()
    again.join("learner", "l", group="g", step=2)
    again.join("actor", "a")
    answers = again.train(1)
    assert kinds(answers) == ["trained"]
    assert kinds(again.read("a")) == [], "not announced again"
    assert (again.ledger.version, again.service.versions.count) == (2, 3)
    assert [row["step"] for row in lines(tmp_path / "batches.jsonl")] == [0, 1]


def test_a_version_whose_announcement_was_lost_with_the_server_is_announced(bench):
    bench.submit("a", bench.tickets("a", 2))
    bench.shard(0)
    bench.ledger.note = lambda name, value: None  # killed between the step and the note of its version
    bench.train(0)
    again = bench.recover()
    again.join("learner", "l", group="g", step=1)
    again.join("actor", "a")
    again.train(0)
    assert [h["manifest"]["version"] for h in again.read("a") if h["type"] == "version"] == [1]
    assert again.ledger.version == 1


def test_a_row_of_a_step_that_was_not_on_record_is_written_once(bench, tmp_path):
    run_step(bench, 0)
    bench.submit("a", bench.tickets("a", 2))
    bench.shard(1)
    bench.ledger.detach(remove=False)  # the server dies between the row and the record
    bench.train(1)
    again = Bench(bench.settings, tmp_path, recover=True, now=bench.now)
    assert [row["step"] for row in lines(tmp_path / "batches.jsonl")] == [0]
    again.join("learner", "l", group="g", step=2)
    again.train(1)
    assert [row["step"] for row in lines(tmp_path / "batches.jsonl")] == [0, 1]


def test_clients_that_do_not_come_back_after_a_restart_lose_their_tickets(bench):
    tickets = bench.tickets("a", 4)
    again = bench.recover()
    again.join("learner", "l", group="g", step=0)
    again.join("monitor", "m")
    again.tick(REJOIN_PERIODS * HEARTBEAT_S - 0.1, beating=("l", "m"))
    assert again.ledger.books()["open"] == 4
    again.tick(HEARTBEAT_S, beating=("l", "m"))
    assert again.ledger.failed == {"actor_lost": 4}
    assert [h["silent"] for h in again.read("m") if h["type"] == "status"][-1] == ["a"]
    again.join("actor", "b", pid=2)
    again.live("b", 0)
    assert [(t.ordinal, t.attempt) for t in again.tickets("b", 4)] == [(t.ordinal, 1) for t in tickets]


def test_tickets_that_were_lost_on_their_way_are_issued_again(bench):
    tickets = bench.tickets("a", 4)
    bench.now += 1.0
    again = bench.recover()
    again.join("actor", "a")
    again.live("a", 0)
    for _ in range(6 * (REJOIN_PERIODS + 1)):
        again.say("a", "beat", in_flight=[[tickets[0].ordinal, 0, 1.0], [tickets[2].ordinal, 0, 1.0]])
        again.tick(HEARTBEAT_S / 6)
    assert again.ledger.failed == {"actor_lost": 2}
    assert sorted(again.ledger.open) == [tickets[0].ordinal, tickets[2].ordinal]
    assert [(t.ordinal, t.attempt) for t in again.tickets("a", 2)] == [(t.ordinal, 1) for t in tickets[1::2]]
    assert again.submit("a", tickets[:1])[0][2] == "accepted"
    assert closes(again.ledger)


def test_the_tickets_of_a_process_that_died_with_the_server_return_when_its_successor_says_hello(bench):
    bench.tickets("a", 4)
    again = bench.recover()
    assert again.join("actor", "a", pid=99)["life"] == 1
    assert again.ledger.failed == {"actor_lost": 4}
    again.live("a", 0)
    assert [t.attempt for t in again.tickets("a", 4)] == [1, 1, 1, 1]


def test_a_stop_that_comes_before_the_learner_is_back_at_a_restarted_server_still_waits_for_its_checkpoint(bench):
    run_step(bench, 0)
    again = bench.recover()
    again.join("monitor", "m")
    again.say("m", "stop", reason="Ctrl-C")
    assert again.service.ending.phase == "stopping"
    again.join("learner", "l", group="g", step=1)
    assert kinds(again.say("l", "next", step=1)) == ["stop"]
    last = again.recover()  # and the learner has died with it
    last.join("monitor", "m")
    last.say("m", "dead", name="l")
    assert (last.service.ending.phase, last.service.account.status) == ("closing", "stopped")


def test_the_phase_of_the_run_survives(bench):
    run_step(bench, 0)
    bench.join("monitor", "m")
    bench.say("m", "stop", reason="Ctrl-C")
    again = bench.recover()
    assert again.service.ending.phase == "stopping"
    again.join("learner", "l", group="g", step=1)
    assert kinds(again.say("l", "next", step=1)) == ["stop"]
    again.say("l", "done", stopped=True)
    last = again.recover()
    assert last.service.ending.phase == "closing"
    assert last.join("learner", "l", group="g", step=1)["type"] == "welcome"
    assert [(h["reason"], h["error"]) for h in last.read("l")] == [("Ctrl-C", False)], "it had missed the stop"
    last.say("l", "bye")
    last.tick(REJOIN_PERIODS * HEARTBEAT_S)
    assert last.service.ending.phase == "ended"
    assert last.service.account.status == "stopped"


def test_a_server_that_died_in_the_middle_of_a_rewind_still_knows_what_is_void(bench, tmp_path):
    for step in range(3):
        run_step(bench, step)
    note, keep = bench.ledger.note, bench.service._files.keep
    bench.ledger.note = lambda name, value: None
    bench.service._files.keep = lambda name, wanted: None
    bench.join("learner", "l", group="second", step=1, pid=2)
    bench.ledger.note, bench.service._files.keep = note, keep
    again = bench.recover()
    assert [row["step"] for row in lines(tmp_path / "batches.jsonl")] == [0]
    again.join("actor", "a")
    again.live("a", 3)
    assert again.tickets("a", 4) == []
    welcome = again.join("learner", "l", group="second", step=1, pid=2)
    assert (welcome["epoch"], again.ledger.version) == (1, 1)
    again.say("l", "trained", step=-1, manifest=_manifest(1, 1), stats={})
    assert kinds(again.live("a", 1, epoch=1)) == ["version", "tickets"], "which it has asked for before"
    assert closes(again.ledger)


def test_what_keeps_the_learner_from_its_checkpoint_is_a_notice_until_it_is_over(bench):
    bench.say("l", "trouble", reason="the disk is full")
    bench.service.tick(bench.now, all_heard=True)
    assert bench.service.account.notices == ["the disk is full"]
    bench.say("l", "trouble", reason="")
    bench.service.tick(bench.now, all_heard=True)
    assert bench.service.account.notices == []


# ---------------------------------------------------------------- silence


def test_a_frozen_actor_is_noticed_within_a_period_and_a_beat_and_its_work_comes_late(bench):
    tickets = bench.tickets("a", 4)
    bench.read("a")
    bench.tick(HEARTBEAT_S, beating=("l",))
    assert bench.ledger.failed == {}
    bench.tick(HEARTBEAT_S / 3, beating=("l",))
    assert bench.ledger.failed == {"actor_lost": 4}
    assert [h["tickets"] for h in bench.read("a") if h["type"] == "cancel"] == [[[t.ordinal, 0] for t in tickets]]
    assert bench.service.account.glance()["silent"] == ["a"]
    assert [h["code"] for h in bench.say("a", "beat")] == ["hello_first"]
    bench.join("actor", "a")
    assert bench.submit("a", tickets[:1])[0][2:] == ["late", "actor_lost"]
    assert bench.service.account.glance()["silent"] == []
    assert bench.ledger.books()["ready"] == 0
    assert closes(bench.ledger)


def test_a_server_that_was_frozen_itself_lets_nobody_go(bench):
    bench.tickets("a", 4)
    bench.now += 4 * HEARTBEAT_S
    bench.service.tick(bench.now, all_heard=True)
    assert bench.ledger.failed == {}
    bench.tick(2 * HEARTBEAT_S, beating=("l",))
    assert bench.ledger.failed == {"actor_lost": 4}


def test_a_client_that_was_silent_and_is_dead_is_not_called_silent_any_more(bench):
    bench.join("monitor", "m")
    bench.tick(2 * HEARTBEAT_S, beating=("l", "m"))
    assert bench.service.account.glance()["silent"] == ["a"]
    bench.say("m", "dead", name="a")
    assert bench.service.account.glance()["silent"] == []


def test_the_status_names_who_has_done_something_useful(bench):
    bench.join("evaluator", "e")
    assert bench.service.account.glance()["worked"] == []
    tickets = bench.tickets("a", 2)
    bench.submit("a", tickets[:1], rewards=(1.0, 1.0), versions=(9,))  # refused
    assert bench.service.account.glance()["worked"] == []
    bench.submit("a", tickets[1:])
    bench.submit("a", bench.tickets("a", 1))
    bench.shard(0)
    bench.train(0)
    bench.say("e", "eval", version=0, epoch=0, metrics={}, samples=[])
    assert sorted(bench.service.account.glance()["worked"]) == ["a", "e", "l"]
    bench.join("actor", "a", pid=7)
    assert sorted(bench.service.account.glance()["worked"]) == ["e", "l"], "its next life has not worked yet"
    assert bench.service.account.glance()["learner"] is True


def test_a_stop_while_the_learner_is_dead_ends_the_run_at_once(bench):
    run_step(bench, 0)
    bench.join("monitor", "m")
    bench.say("m", "stop", reason="Ctrl-C")
    bench.say("m", "dead", name="l")
    assert (bench.service.ending.phase, bench.service.account.status) == ("closing", "stopped")
    assert "gone before its last checkpoint" in bench.service.account.reason


def test_the_last_evaluation_waits_for_an_evaluator_that_is_started_again(settings, tmp_path):
    bench = Bench(config(steps=1, buffer={"heartbeat_s": HEARTBEAT_S}), tmp_path)
    bench.learner()
    bench.join("actor", "a")
    bench.live("a", 0)
    bench.join("evaluator", "e")
    bench.join("monitor", "m")
    run_step(bench, 0)
    bench.say("l", "done", stopped=False)
    bench.say("m", "dead", name="e")
    bench.tick(10.0, beating=("l", "m"))
    assert bench.service.ending.phase == "evaluating"
    welcome = bench.join("evaluator", "e", pid=2)
    assert welcome["manifest"]["version"] == 1
    bench.say("e", "eval", version=1, epoch=0, metrics={"accuracy": 1.0}, samples=[])
    assert (bench.service.ending.phase, bench.service.account.reason) == ("closing", "all steps are trained")


def test_colocated_no_step_is_delivered_after_a_restart_before_the_actors_have_told_that_they_sleep(tmp_path):
    settings = config(
        steps=6,
        buffer={"heartbeat_s": HEARTBEAT_S, "max_staleness": 0},
        actors={"placement": "colocated"},
    )
    bench = Bench(settings, tmp_path)
    bench.learner()
    bench.join("actor", "a")
    bench.live("a", 0)
    bench.submit("a", bench.tickets("a", 2))
    again = bench.recover()
    again.join("learner", "l", group="g", step=0)
    assert again.shard(0) == [], "the actor is away, and may be awake"
    again.join("actor", "a")
    assert again.shard(0) == []
    assert [h["tickets"] for h in again.live("a", 0)] == [[]], "it has nothing to do, and is told so"
    again.read("l")
    again.say("a", "asleep")
    assert [h["step"] for h in again.read("l") if h["type"] == "shard"] == [0]
