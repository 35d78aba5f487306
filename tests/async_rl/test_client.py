"""The client's side of the connection: joining, beating, waiting, asking, leaving."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest
from buffer_helpers import make
from client_helpers import FakeServer, connected, receive_for_ever
from server_helpers import WAIT_S, config, eventually, running

from async_rl.client import Client, Stopped
from async_rl.errors import DeadlineError, HandshakeError, WireError


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
        f"async-rl: warning: a: the server at {server.address} has not answered for 0.1875 s; trying for 0.5 s\n"
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
        assert capfd.readouterr().err == f"async-rl: warning: a: the server at {server.address} is back\n"


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
