"""What a client says again after a break or a lost answer, and that no answer is taken for another's."""

from __future__ import annotations

import threading

import pytest
from buffer_helpers import annotation, answer, make
from client_helpers import FakeServer, connected, receive_for_ever
from server_helpers import WAIT_S, Cast, config, finish, running

from async_rl.client import Client
from async_rl.errors import HandshakeError, StartAgainError
from async_rl.protocol import Ticket


def test_a_failed_attempt_is_told_again_until_it_is_acknowledged():
    with connected(heartbeat_s=0.1) as (server, client):
        client.send("fail", ordinal=3, attempt=1, reason="timeout", detail="", final=False)
        assert [server.hear("fail", alive=True)["ordinal"] for _ in range(2)] == [3, 3]
        assert client.unacked == 1
        server.say("ack", results=[[3, 1, "failed", ""]])
        client.receive(WAIT_S)
        assert client.unacked == 0


def test_an_evaluation_and_the_end_are_told_again_after_a_break():
    with connected(heartbeat_s=0.1) as (server, client):
        for version in (1, 2):
            client.send("eval", epoch=0, version=version, metrics={}, samples=[])
        client.send("done", stopped=False)
        assert [server.hear("eval", "done")["type"] for _ in range(3)] == ["eval", "eval", "done"]
        server.say("refused", code="hello_first", reason="who are you?")
        server.welcome()
        heard = [server.hear("eval", "done", alive=True) for _ in range(2)]
        assert [(h["type"], h.get("version")) for h in heard] == [("eval", 2), ("done", None)]


def test_the_wish_to_stop_is_told_again_after_a_break():
    with connected() as (server, client):
        client.send("stop", reason="asked to stop")
        server.hear("stop")  # and dies before it has done anything about it
        server.say("refused", code="hello_first", reason="who are you?")
        server.welcome()
        assert server.hear("stop")["reason"] == "asked to stop"


def test_groups_are_sent_again_until_they_are_acknowledged():
    with connected(heartbeat_s=0.05) as (server, client):
        client.send_groups([make(0), make(1, 2)])
        first = server.hear("submit")
        assert [(g["ordinal"], g["attempt"]) for g in first["groups"]] == [(0, 0), (1, 2)]
        server.say("ack", results=[[0, 0, "accepted", ""]])
        assert client.receive(WAIT_S)[0][0]["type"] == "ack"
        assert client.unacked == 1
        again = server.hear("submit")
        assert [(g["ordinal"], g["attempt"]) for g in again["groups"]] == [(1, 2)]
        server.say("ack", results=[[1, 2, "late", ""]])
        client.receive(WAIT_S)
        assert client.unacked == 0


def test_after_a_break_the_client_rejoins_and_repeats_what_the_server_needs():
    with connected(heartbeat_s=0.1) as (server, client):
        client.send("live", version=3, checksum="c")
        client.send("credit", count=5)
        client.send_groups([make(7)])
        server.hear("submit")
        server.say("tickets", tickets=[[0] * 6, [1] * 6])
        assert client.receive(WAIT_S)[0][0]["type"] == "tickets"
        server.say("refused", code="hello_first", reason="who are you?")
        server.welcome()
        heard = [server.hear("live", "credit", "submit") for _ in range(3)]
        assert {h["type"] for h in heard} == {"live", "credit", "submit"}
        credit = next(h for h in heard if h["type"] == "credit")
        assert (credit["count"], credit["received"]) == (3, 0)
        header, _ = client.receive(WAIT_S)[0]
        assert (header["type"], header["manifest"]["version"]) == ("version", 4)


def test_a_scorer_repeats_credit_and_annotations_until_they_are_acknowledged_after_a_break_too():
    with connected(heartbeat_s=0.1) as (server, client):
        client.send("credit", count=3)
        server.hear("credit")
        server.lease(make(4), make(5))
        assert [g["ordinal"] for g in client.receive(WAIT_S)[0][0]["groups"]] == [4, 5]
        client.send_annotations([annotation(make(4), "reward"), annotation(make(5), "reward")])
        sent = server.hear("annotate")
        assert [(g["ordinal"], g["stage"], g["values"]) for g in sent["groups"]] == [(4, "reward", 2), (5, "reward", 2)]
        server.say("ack", results=[[4, 0, "accepted", ""]])
        client.receive(WAIT_S)
        assert [g["ordinal"] for g in server.hear("annotate", alive=True)["groups"]] == [5]
        server.say("refused", code="hello_first", reason="who are you?")
        server.welcome()
        heard = {h["type"]: h for h in (server.hear("credit", "annotate") for _ in range(2))}
        assert (heard["credit"]["count"], heard["credit"]["received"]) == (1, 0)
        assert [g["ordinal"] for g in heard["annotate"]["groups"]] == [5]
        server.say("ack", results=[[5, 0, "late", "moved_on"]])
        while client.unacked:
            client.receive(WAIT_S)


def test_a_break_does_not_wake_a_sleeper_and_live_ends_its_sleep():
    def rejoin(server):
        server.say("refused", code="hello_first", reason="who are you?")
        server.welcome()  # with version 4

    with connected() as (server, client):
        client.send("live", version=4, checksum="c")
        client.send("asleep")
        server.hear("asleep")
        rejoin(server)
        assert [server.hear("live", "asleep")["type"] for _ in range(2)] == ["live", "asleep"]
        assert client.receive(0.05) == [], "it holds version 4 already"
        client.send("live", version=5, checksum="c")
        server.hear("live")
        rejoin(server)
        assert server.hear("live")["version"] == 5
        client.send("credit", count=1)
        assert server.hear("asleep", "credit")["type"] == "credit"


def test_a_trained_step_that_was_lost_in_a_break_is_told_again_until_it_is_answered():
    with connected(heartbeat_s=0.1) as (server, client):
        client.send("trained", step=3, manifest={}, stats={})
        server.hear("trained")
        server.say("refused", code="hello_first", reason="who are you?")
        server.welcome()
        assert server.hear("trained")["step"] == 3
        server.say("trained", step=3, books={})
        while client.receive(WAIT_S)[-1][0]["type"] != "trained":
            continue
        server.say("refused", code="hello_first", reason="who are you?")
        server.welcome()
        assert server.hear("trained", "beat")["type"] == "beat"


def test_another_run_at_the_same_address_ends_this_life_of_the_client_and_the_next_one_may_join_it():
    with connected(heartbeat_s=0.1) as (server, client):
        server.say("refused", code="hello_first", reason="who are you?")
        server.welcome(run_id="another")
        with pytest.raises(StartAgainError, match="another run"):
            receive_for_ever(client)


def test_an_actor_that_was_taken_for_dead_comes_back_and_works_on(tmp_path):
    settings = config()
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        cast.learner()
        actor = cast.actor(credit=4)
        tickets = actor.tickets(4)
        cast.join("monitor", "launcher").send("dead", name="a")
        assert len(actor.until("cancel")[0]["tickets"]) == 4
        actor.send_groups([answer(tickets[0])])
        assert actor.until("ack")[0]["results"] == [[0, 0, "late", "actor_lost"]]
        actor.send("credit", count=4)
        again = actor.tickets(4)
        assert [(t.ordinal, t.attempt) for t in again] == [(i, 1) for i in range(4)]
        finish(actor, again)
        assert isinstance(again[0], Ticket)


def test_the_second_answer_to_one_question_is_not_taken_for_the_answer_to_the_next():
    """Two welcomes, as to a client whose hello was said again: what it waits for is asked twice, and answered twice."""
    with connected() as (server, client):
        answers = []
        asking = threading.Thread(target=lambda: answers.append(client.request("next", "shard", step=4)))
        asking.start()
        server.hear("next")
        server.say("refused", code="hello_first", reason="who are you?")
        server.welcome()
        server.hear("next")
        server.say("shard", step=4)
        server.say("shard", step=4)
        asking.join(WAIT_S)
        for question, answer, step in (("trained", "trained", 4), ("next", "shard", 5), ("trained", "trained", 5)):
            for told in (step - 1, step):
                server.say(answer, step=told)
            assert client.request(question, answer, deadline_s=WAIT_S, step=step)[0]["step"] == step
        for path in ("old", "new"):
            server.say("snapshot", path=path, ok=path == "old")
        assert client.request("snapshot", "snapshot", deadline_s=WAIT_S, path="new")[0]["ok"] is False


def test_a_repeated_answer_does_not_settle_the_next_question():
    with connected(heartbeat_s=0.1) as (server, client):
        client.send("trained", step=5, manifest={}, stats={})
        server.hear("trained")
        server.say("trained", step=4)
        server.say("refused", code="hello_first", reason="who are you?")
        server.welcome()
        assert server.hear("trained")["step"] == 5


@pytest.mark.parametrize(("role", "ends"), [("learner", True), ("actor", False)])
def test_a_learner_that_comes_back_to_another_epoch_must_begin_again(role, ends):
    server = FakeServer(0.1)
    try:
        with Client(server.address, role, "l", "c") as client:
            thread = threading.Thread(target=server.welcome)
            thread.start()
            client.connect(WAIT_S)
            thread.join()
            server.say("refused", code="hello_first", reason="who are you?")
            server.welcome(epoch=1)
            if ends:
                with pytest.raises(HandshakeError, match="without this learner") as error:
                    receive_for_ever(client)
                assert error.value.code == "ahead"
            else:
                assert server.hear("beat")["type"] == "beat"
    finally:
        server.close()
