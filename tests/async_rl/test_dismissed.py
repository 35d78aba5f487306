"""Who is let go learns it in its I/O thread, so that a rank ends although its main thread is in a collective."""

import subprocess
import sys
import threading
import time

import pytest
from client_helpers import FakeServer, connected
from server_helpers import WAIT_S, config, running

from async_rl.client import Client, Stopped
from async_rl.errors import AsyncRLError, DeadlineError, HandshakeError
from learner.rank import await_end

BLOCKED = """
import sys, threading
from async_rl.client import Client
from learner.rank import leave_if_forsaken

with Client(sys.argv[1], "learner", "learner0", "c") as client:
    client.dismissed = lambda error: leave_if_forsaken("learner0", error)
    client.connect(30)
    threading.Event().wait(60)  # what a collective looks like whose partner has vanished
"""


@pytest.mark.real
@pytest.mark.parametrize(("code", "ends"), [("forsaken", True), ("replaced", False)])
def test_a_rank_that_was_forsaken_asks_to_be_started_again_wherever_its_main_thread_is(code, ends):
    server = FakeServer(30.0)
    rank = subprocess.Popen([sys.executable, "-c", BLOCKED, server.address], stderr=subprocess.PIPE, text=True)
    try:
        server.welcome()
        server.say("refused", reason="rank 1 on b has been away", code=code)
        if ends:
            _, said = rank.communicate(timeout=WAIT_S)
            assert (rank.returncode, said) == (75, "async-rl: learner0: rank 1 on b has been away\n")
        else:  # its main thread is told, when it asks
            with pytest.raises(subprocess.TimeoutExpired):
                rank.wait(1.0)
    finally:
        rank.kill()
        rank.communicate(timeout=10)
        server.close()


def test_who_is_dismissed_is_told_in_both_threads():
    heard = []
    with connected() as (server, client):
        client.dismissed = lambda error: heard.append((error.code, threading.current_thread().name))
        server.say("refused", reason="rank 1 on b has been away", code="forsaken")
        with pytest.raises(HandshakeError, match="rank 1 on b has been away"):
            client.receive(WAIT_S)
    assert heard == [("forsaken", "client")]


def test_a_process_that_is_asked_to_end_does_not_wait_for_a_server_that_is_not_there():
    began = time.monotonic()
    with Client("tcp://127.0.0.1:1", "actor", "a", "c") as client, pytest.raises(Stopped, match="asked to end"):
        client.connect(60.0, lambda: True)
    assert time.monotonic() - began < 10


def test_a_server_at_an_ipv6_address_is_reached(tmp_path):
    settings = config(buffer={"bind": "tcp://[::1]:*"})
    with running(settings, tmp_path) as server:
        assert server.address.startswith("tcp://[::1]:")
        with Client(server.address, "actor", "a", settings.contract_hash()) as client:
            assert client.connect(WAIT_S)["type"] == "welcome"


def end(server, client, **stop):
    """What a rank that waits for the end makes of a stop."""
    server.say("stop", **stop)
    await_end(client, WAIT_S, lambda: False)


def test_a_rank_of_a_further_host_stays_until_the_run_has_ended():
    with connected() as (server, client):
        server.say("stop", reason="the answer to next", error=False, step=3)
        with pytest.raises(DeadlineError, match=r"did not end the run within 0\.2 s of this rank's last step"):
            await_end(client, 0.2, lambda: False)
        end(server, client, reason="all steps are trained", error=False)
        with pytest.raises(AsyncRLError, match="the run failed: the disk is gone"):
            end(server, client, reason="the disk is gone", error=True)
        await_end(client, WAIT_S, lambda: True)
        server.say("refused", reason="rank 0 is gone", code="forsaken")
        with pytest.raises(HandshakeError, match="rank 0 is gone"):
            await_end(client, WAIT_S, lambda: False)
