"""Ranks of several hosts at the server itself: who waits is shown, lost and found again; then they come as learners."""

import pytest
from server_helpers import config
from service_helpers import Bench

from async_rl.config.shared import shared_settings


@pytest.fixture
def server(settings, tmp_path):
    made = Bench(settings, tmp_path)
    yield made
    made.service.close()


def muster(server, name, rank, store=""):
    assert server.join("recruit", name, rank=rank, world=2)["type"] == "welcome"
    return server.say(name, "muster", settings=shared_settings(server.settings), group="2 hosts", store=store)


def test_two_ranks_meet_and_one_that_waits_long_is_told_of(server, capsys):
    assert muster(server, "r1", 1) == []
    server.tick(20.0, beating=("r1",))
    assert server.service.account.notices == ["1 of 2 learner ranks are here; missing: 0"]
    assert capsys.readouterr().out.count("missing: 0") == 1
    assert [(h["type"], h["store"]) for h in muster(server, "r0", 0, store="h:7")] == [("mustered", "h:7")]
    assert [h["store"] for h in server.read("r1") if h["type"] == "mustered"] == ["h:7"]
    server.tick(0.1, beating=("r1",))
    assert server.service.account.notices == []


def test_one_that_has_fallen_silent_is_not_met(server):
    muster(server, "r0", 0, store="h:7")
    server.tick(2.1 * server.settings.buffer.heartbeat_s)
    assert muster(server, "r1", 1) == []
    assert [h["store"] for h in muster(server, "r0 again", 0, store="h:8")] == ["h:8"]


def test_after_a_restart_of_the_server_they_meet_when_they_have_said_so_again(server):
    muster(server, "r0", 0, store="h:7")
    server = server.recover()
    assert muster(server, "r1", 1) == []
    assert [h["store"] for h in muster(server, "r0", 0, store="h:7")] == ["h:7"]
    server.service.close()


def test_a_rank_beyond_the_group_and_a_message_of_another_role_are_refused(server):
    assert server.join("recruit", "r", rank=2, world=2)["type"] == "refused"
    server.join("actor", "a")
    assert server.say("a", "muster", settings={}, store="")[0]["code"] == "wrong_role"


def told(server, name):
    return [header["code"] for header in server.read(name) if header["type"] == "refused"]


def test_a_rank_whose_partner_s_host_has_vanished_is_told_to_begin_again_and_not_while_it_may_come_back(server):
    server.learner(name="l0", rank=0, world=2, host="a")
    server.join("learner", "l1", rank=1, world=2, group="g", host="b")
    server.tick(0.9, beating=("l0", "l1"))
    server.tick(9.0, beating=("l0",))
    assert told(server, "l0") == []
    server.join("learner", "l1", rank=1, world=2, group="g", host="b", step=0)  # the cable was cut for 9 s
    server.tick(9.0, beating=("l0",))
    assert told(server, "l0") == []
    server.tick(3.0, beating=("l0",))
    assert told(server, "l0")[:1] == ["forsaken"]
    assert not server.service.roster.of("learner")
    assert muster(server, "r0", 0, store="h:7") == []
    assert server.learner(name="l0", rank=0, world=2, host="a", group="h")["type"] == "welcome"


@pytest.mark.parametrize(("lost", "stays"), [("l1", "l0"), ("l0", "l1")])
def test_after_the_last_step_rank_0_waits_for_nobody_and_the_others_for_its_checkpoint(tmp_path, lost, stays):
    server = Bench(config(steps=1), tmp_path)
    server.learner(name="l0", rank=0, world=2, host="a")
    server.join("learner", "l1", rank=1, world=2, group="g", host="b")
    server.tick(0.9, beating=("l0", "l1"))
    server.join("actor", "a")
    server.live("a", 0)
    server.submit("a", server.tickets("a", 2))
    server.shard(0, "l0")
    assert [h["type"] for h in server.train(0, name="l0")] == ["trained"]
    server.tick(30.0, beating=(stays, "a"))
    assert told(server, stays)[:1] == ([] if stays == "l0" else ["forsaken"])
    server.service.close()


def test_a_host_that_never_comes_ends_the_run_with_the_ranks_that_are_missing(tmp_path):
    server = Bench(config(learner={"step_deadline_s": 30.0}), tmp_path)
    muster(server, "r0", 0, store="h:7")
    server.tick(29.0, beating=("r0",))
    assert server.service.ending.phase == "running"
    server.tick(2.0, beating=("r0",))
    (stop,) = [header for header in server.read("r0") if header["type"] == "stop"]
    assert stop["reason"] == (
        "no learner was connected for 30 s (learner.step_deadline_s) at step 0: 1 of 2 learner ranks are here; "
        "missing: 1"
    )
    server.service.close()
