"""A rank's side of the muster, against a real server: it meets the others, or says why not, by its exit code, too."""

import threading

import pytest
import torch
from server_helpers import WAIT_S, config, eventually

from async_rl.client import Client
from async_rl.errors import AsyncRLError, HandshakeError
from learner.meeting import Muster, kind_of_group

KIND = "2 hosts, cpu, torch 2.13.0"


@pytest.fixture(autouse=True)
def interfaces(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")


@pytest.fixture
def settings():
    return config(learner={"ranks": 2})


@pytest.fixture
def ranks(server, settings):
    """Begins ranks, each in a thread; what each got or raised, once it is known."""
    found, threads, ended = {}, [], []

    def begin(rank, config=settings, kind=KIND):
        def come():
            try:
                found[rank] = Muster(server.address, config, kind, lambda: bool(ended))(rank, 2)
            except AsyncRLError as error:
                found[rank] = error

        threads.append(threading.Thread(target=come))
        threads[-1].start()
        return found

    def end(rank):
        threads[-1].join(WAIT_S)
        return found[rank]

    begin.end = end
    begin.ended = ended
    yield begin
    ended.append(True)
    for thread in threads:
        thread.join(WAIT_S)


def say(server, settings, kind):
    """As the launcher does."""
    with Client(server.address, "monitor", "m", settings.contract_hash()) as client:
        client.connect(WAIT_S)
        client.send(kind, reason="asked to stop" if kind == "stop" else "the disk is gone")


def wait_for_a_rank(server):
    eventually(lambda: any(session.role == "recruit" for session in server.service.roster))


def test_two_ranks_come_to_the_same_store(ranks):
    found = ranks(0)
    ranks(1)
    ranks.end(1)
    ranks.end(0)
    found[0].set("from 0", "value")
    assert found[1].get("from 0") == b"value"


def test_a_run_that_is_stopped_before_all_are_there_is_no_failure_of_those_that_wait(server, settings, ranks):
    ranks(1)
    wait_for_a_rank(server)
    say(server, settings, "stop")
    error = ranks.end(1)
    assert isinstance(error, HandshakeError)
    assert error.exit_code == 0
    assert str(error) == "rank 1: the run ended before all ranks were there: asked to stop"


def test_a_run_that_has_failed_meanwhile_is_one(server, settings, ranks):
    ranks(1)
    wait_for_a_rank(server)
    say(server, settings, "fatal")
    error = ranks.end(1)
    assert error.exit_code == 1
    assert "the disk is gone" in str(error)


def test_one_that_is_asked_to_end_while_it_waits_ends(server, ranks):
    ranks(0)
    wait_for_a_rank(server)
    ranks.ended.append(True)
    assert "this process was asked to end" in str(ranks.end(0))
    assert ranks.end(0).exit_code == 1


def test_another_setting_ends_a_rank_with_both_values(ranks):
    ranks(1, config(learner={"ranks": 2, "lr": 0.5}))
    assert "learner.lr is 0.5 here and" in str(ranks.end(1))
    assert ranks.end(1).exit_code == 1


def test_what_a_group_is_made_of_is_told_although_no_setting_says_so():
    assert kind_of_group(3, torch.device("cpu")) == f"3 hosts, cpu, torch {torch.__version__}"
