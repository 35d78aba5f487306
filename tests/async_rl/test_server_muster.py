"""Ranks of several hosts at the server itself: who waits is shown, lost and found again; then they come as learners."""

import pytest
from service_helpers import Bench

from async_rl.config.shared import shared_settings


@pytest.fixture
def server(settings, tmp_path):
    made = Bench(settings, tmp_path)
    yield made
    made.service.close()


def muster(server, name, rank, store=""):
    assert server.join("recruit", name, rank=rank, world=2)["type"] == "welcome"
    return server.say(name, "muster", settings=shared_settings(server.settings), store=store)


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
