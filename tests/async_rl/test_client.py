from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from buffer_helpers import annotation, answer, make
from server_helpers import WAIT_S, Cast, config, eventually, finish, manifest, running

from async_rl.client import Client, Stopped
from async_rl.errors import DeadlineError, HandshakeError, StartAgainError, WireError
from async_rl.protocol import Ticket
from async_rl.wire import Header, encode_groups, pack_header, unpack_header


class FakeServer:
    """A ROUTER in the test's own thread, which answers only when told."""

    def __init__(self, heartbeat_s: float, address: str = "tcp://127.0.0.1:*") -> None:
        self.heartbeat_s = heartbeat_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.identity = b""

    def hear(self, *kinds: str, alive: bool = False) -> Header:
        """The next message of one of these types; beats on the way are answered if the server is to be alive."""
        while self._socket.poll(WAIT_S * 1000):
            self.identity, head, *_ = self._socket.recv_multipart()
            header = unpack_header(head)
            if header["type"] in kinds:
                return header
            if header["type"] == "beat" and alive:
                self.say("beat")
        raise AssertionError(f"no {kinds}")

    def say(self, kind: str, **fields) -> None:
        self._socket.send_multipart([self.identity, pack_header({"type": kind, **fields})])

    def lease(self, *groups) -> None:
        self._socket.send_multipart([self.identity, *encode_groups("lease", groups, lease_s=9.0)])

    def welcome(self, run_id: str = "r", weights: str = "tcp://127.0.0.1:1", epoch: int = 0) -> None:
        self.hear("hello")
        self.say(
            "welcome",
            run_id=run_id,
            heartbeat_s=self.heartbeat_s,
            next_step=0,
            epoch=epoch,
            manifest=manifest(4).to_wire(),
            weights_address=weights,
        )

    def close(self) -> None:
        self._context.destroy(0)


def receive_for_ever(client: Client) -> None:
    while True:
        client.receive(WAIT_S)


@contextmanager
def connected(heartbeat_s: float = 30.0, **welcome: str) -> Iterator[tuple[FakeServer, Client]]:
    server = FakeServer(heartbeat_s)
    try:
        with Client(server.address, "actor", "a", "c") as client:
            thread = threading.Thread(target=server.welcome, kwargs=welcome)
            thread.start()
            client.connect(WAIT_S)
            thread.join()
            yield server, client
    finally:
        server.close()


def test_nothing_at_the_address_is_a_sentence_with_the_address_and_the_time():
    with (
        Client("tcp://127.0.0.1:1", "actor", "a", "c") as client,
        pytest.raises(DeadlineError, match=r"no answer from tcp://127\.0\.0\.1:1 within 0\.1 s"),
    ):
        client.connect(0.1)


def test_an_impossible_address_is_a_sentence():
    with Client("nonsense", "actor", "a", "c") as client, pytest.raises(HandshakeError, match="cannot use the address"):
        client.connect(WAIT_S)


def test_the_servers_own_sentence_explains_a_refusal(tmp_path):
    settings = config()
    with (
        running(settings, tmp_path) as server,
        Client(server.address, "actor", "a", "other") as client,
        pytest.raises(HandshakeError, match=r"same config\.toml"),
    ):
        client.connect(WAIT_S)


def test_chunks_come_from_the_host_that_was_reached_when_the_server_listens_everywhere():
    server = FakeServer(30.0)
    with Client(server.address, "actor", "a", "c") as client:
        thread = threading.Thread(target=server.welcome, kwargs={"weights": "tcp://0.0.0.0:77"})
        thread.start()
        assert client.connect(WAIT_S)["weights_address"] == "tcp://127.0.0.1:77"
        thread.join()
    server.close()


def test_the_io_thread_beats_by_itself_with_the_callers_facts():
    with connected(heartbeat_s=0.05) as (server, client):
        client.beat_info = lambda: {"timer": {"state": "generating"}, "info": {"n": 1}}
        while server.hear("beat").get("info") is None:
            server.say("beat")
        beat = server.hear("beat")
        assert beat["timer"] == {"state": "generating"}
        assert beat["cpu_s"] > 0
        assert beat["rss_bytes"] > 1 << 20


def test_a_fault_in_the_beat_is_raised_where_the_caller_looks():
    with connected(heartbeat_s=0.05) as (_, client):
        client.beat_info = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            receive_for_ever(client)


def test_a_silent_server_is_missed_after_a_period_and_given_up_when_it_stays_away(monkeypatch, capfd):
    monkeypatch.setattr("async_rl.connection.SERVER_GONE_S", 0.5)
    with connected(heartbeat_s=0.1875) as (server, client):
        server.say("version", manifest=None)
        began = time.monotonic()
        assert [h["type"] for h, _ in client.receive(WAIT_S)] == ["version"]
        with pytest.raises(DeadlineError, match=r"silent for 0\.5 s: is it alive"):
            receive_for_ever(client)
        assert 0.45 < time.monotonic() - began < 3
    assert capfd.readouterr().err == (
        f"async-rl: a: the server at {server.address} has not answered for 0.1875 s; trying for 0.5 s\n"
    )


def test_while_the_server_is_silent_messages_wait_and_when_it_is_back_the_client_says_so_once(capfd):
    with connected(heartbeat_s=0.1) as (server, client):
        eventually(lambda: "has not answered for 0.1 s" in capfd.readouterr().err)
        client.send("credit", count=2)
        client.send_groups([make(3)])
        for _ in range(4):
            assert server.hear("beat", "credit", "submit")["type"] == "beat"
        server.say("beat")
        assert {server.hear("credit", "submit")["type"] for _ in range(2)} == {"credit", "submit"}
        assert capfd.readouterr().err == f"async-rl: a: the server at {server.address} is back\n"


def test_a_request_outlives_the_server_and_is_asked_again_of_the_next_one():
    with connected(heartbeat_s=0.1) as (server, client):
        answers = []
        asking = threading.Thread(target=lambda: answers.append(client.request("next", "shard", step=4)))
        asking.start()
        assert server.hear("next")["step"] == 4
        server.close()
        server = FakeServer(0.1, server.address)
        try:
            server.hear("beat", "hello")
            server.say("refused", code="hello_first", reason="who are you?")
            server.welcome(weights="tcp://127.0.0.1:2")
            assert server.hear("next")["step"] == 4
            server.say("shard", step=4)
            asking.join(WAIT_S)
            assert answers[0][0]["step"] == 4
            assert client.weights_address == "tcp://127.0.0.1:2"
            server.say("refused", code="hello_first", reason="who are you?")
            assert server.hear("hello")["step"] == 5, "it has the batch of step 4"
        finally:
            server.close()


def test_the_deadline_of_a_request_holds_while_the_server_is_away():
    with connected(heartbeat_s=0.1) as (server, client):
        server.close()
        began = time.monotonic()
        with pytest.raises(DeadlineError, match=r"did not answer 'snapshot' within 0\.5 s"):
            client.request("snapshot", "snapshot", deadline_s=0.5, path="p")
        assert 0.4 < time.monotonic() - began < 2


FROZEN = """
import sys
from async_rl import connection
from async_rl.client import Client
connection.SERVER_GONE_S = 0.6
with Client(sys.argv[1], "actor", "frozen", "c") as client:
    client.connect(10)
    client.send("credit", count=1)
    while True:
        if any(header["type"] == "stop" for header, _ in client.receive(10)):
            break
"""


@pytest.mark.real
def test_a_client_that_was_frozen_does_not_take_its_own_sleep_for_the_servers_death():
    server = FakeServer(0.2)
    child = subprocess.Popen([sys.executable, "-c", FROZEN, server.address])
    try:
        server.welcome()
        server.hear("credit", alive=True)
        child.send_signal(signal.SIGSTOP)
        time.sleep(1.5)  # the fault itself: longer than a silent server is waited for
        child.send_signal(signal.SIGCONT)
        server.hear("beat")
        server.say("refused", code="hello_first", reason="who are you?")
        server.welcome()
        assert server.hear("credit", alive=True)["count"] == 1
        server.say("stop", reason="over", error=False)
        assert child.wait(WAIT_S) == 0
    finally:
        child.kill()
        child.wait(WAIT_S)
        server.close()


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


def test_a_version_of_a_later_epoch_is_news_although_its_number_is_lower():
    with connected(heartbeat_s=0.1) as (server, client):
        client.send("live", epoch=1, version=4, checksum="c")
        server.say("refused", code="hello_first", reason="who are you?")
        server.welcome()  # version 4 of epoch 0
        header, _ = client.receive(WAIT_S)[0]
        assert (header["type"], header["manifest"]["epoch"], header["manifest"]["version"]) == ("version", 0, 4)


@pytest.mark.parametrize("code", ["replaced", "ahead"])
def test_a_learner_that_must_start_again_learns_why(code):
    with connected() as (server, client):
        server.say("refused", code=code, reason="start again")
        with pytest.raises(HandshakeError, match="start again") as caught:
            client.receive(WAIT_S)
        assert caught.value.code == code


def test_what_arrived_before_the_end_is_read_before_it_is_raised(monkeypatch):
    monkeypatch.setattr("async_rl.connection.SERVER_GONE_S", 0.1)
    with connected(heartbeat_s=0.05) as (server, client):
        server.say("version", manifest=None)
        eventually(lambda: client._inbox._error is not None)
        assert [h["type"] for h, _ in client.receive(WAIT_S)] == ["version"]
        with pytest.raises(DeadlineError):
            client.receive(0.0)


def test_messages_are_numbered_without_gaps():
    with connected(heartbeat_s=30.0) as (server, client):
        client.send("credit", count=1)
        client.send("live", version=0)
        client.send_groups([make(0)])
        seqs = [server.hear("beat", "credit", "live", "submit")["seq"] for _ in range(4)]
        assert seqs == [2, 3, 4, 5]


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
        assert [(g["ordinal"], g["arrays"]) for g in sent["groups"]] == [
            (4, [["reward", "float32", [2]]]),
            (5, [["reward", "float32", [2]]]),
        ]
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


def test_a_message_that_the_server_refuses_is_an_error_here():
    with connected() as (server, client):
        server.say("refused", code="bad_step", reason="asks for step 9")
        with pytest.raises(WireError, match="bad_step: asks for step 9"):
            client.receive(WAIT_S)


def test_request_returns_the_answer_and_keeps_the_rest_in_order():
    with connected() as (server, client):
        for kind in ("version", "cancel", "snapshot", "version"):
            server.say(kind, ok=True, tickets=[])
        header, _ = client.request("snapshot", "snapshot", deadline_s=WAIT_S, path="p")
        assert header["ok"] is True
        rest: list[str] = []
        while len(rest) < 3:
            rest += [h["type"] for h, _ in client.receive(WAIT_S)]
        assert rest == ["version", "cancel", "version"]


def test_request_gives_up_at_its_deadline_and_on_stop():
    with connected() as (server, client):
        with pytest.raises(DeadlineError, match=r"did not answer 'snapshot' within 0\.05 s"):
            client.request("snapshot", "snapshot", deadline_s=0.05, path="p")
        server.say("stop", reason="Ctrl-C", error=False)
        with pytest.raises(Stopped, match="Ctrl-C") as stopped:
            client.request("next", "shard", step=0)
        assert stopped.value.error is False


def test_the_descriptor_is_readable_exactly_while_something_waits():
    with connected() as (server, client):
        assert select.select([client.fileno()], [], [], 0)[0] == []
        server.say("version", manifest=None)
        assert select.select([client.fileno()], [], [], WAIT_S)[0]
        client.receive(0.0)
        assert select.select([client.fileno()], [], [], 0)[0] == []


def test_close_says_goodbye_and_leaves_no_thread_and_no_descriptor():
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with connected() as (server, client):
        client.send("credit", count=1)
        client.close()
        assert server.hear("bye")["type"] == "bye"
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert threading.active_count() == threads


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
