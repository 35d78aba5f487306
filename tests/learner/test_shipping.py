"""A checkpoint reaches hosts that do not share the run folder, and only those; ranks are threads with a folder each."""

import threading
from types import SimpleNamespace

import pytest

from async_rl.errors import AsyncRLError
from learner import shipping
from learner.shipping import RECEIVED, bring, discard


class Ranks:
    """The two collectives that shipping makes, over threads."""

    def __init__(self, world):
        self._barrier = threading.Barrier(world)
        self._votes = [True] * world
        self._sent = b""

    def rank(self, rank, local_rank):
        def all_agree(willing):
            self._votes[rank] = willing
            self._barrier.wait(10)
            agreed = all(self._votes)
            self._barrier.wait(10)
            return agreed

        def broadcast_bytes(data):
            if rank == 0:
                self._sent = data
            self._barrier.wait(10)
            sent = self._sent
            self._barrier.wait(10)
            return sent

        return SimpleNamespace(
            rank=rank, local_rank=local_rank, all_agree=all_agree, broadcast_bytes=broadcast_bytes, world=3
        )


def on_ranks(places, work):
    """Run ``work(group, out)`` for each (local rank, folder); what each returned or raised."""
    ranks, done = Ranks(len(places)), [None] * len(places)

    def run(rank):
        local_rank, out = places[rank]
        try:
            done[rank] = work(ranks.rank(rank, local_rank), out)
        except AsyncRLError as error:
            done[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return done


@pytest.fixture
def first(tmp_path):
    """The run folder of rank 0's host with a checkpoint."""
    folder = tmp_path / "first" / "checkpoints" / "step_7"
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "model.safetensors").write_bytes(bytes(range(250)))
    (folder / "trainer.json").write_text("{}")
    (folder / "empty").touch()
    (folder / "groups.bin").write_text("the server's")
    return tmp_path / "first"


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def fetch(group, out):
    return bring(group, out / "checkpoints" / "step_7", out / "own", "abc")


def test_whoever_sees_the_folder_of_rank_0_reads_there_and_nothing_is_sent(first):
    (first / "checkpoints" / ".life_before").touch()
    found = on_ranks([(0, first), (1, first), (0, first)], fetch)
    assert found == [first / "checkpoints" / "step_7"] * 3, "the marker of a life that ended early is of no account"
    assert not (first / "own").exists()
    assert not list(first.glob("checkpoints/.*"))


def test_another_host_gets_every_file_once_but_for_those_of_the_server(first, tmp_path, monkeypatch):
    monkeypatch.setattr(shipping, "BLOCK_BYTES", 100)  # the model takes three pieces
    second = tmp_path / "second"
    stale = second / "own" / RECEIVED / "step_3"
    stale.mkdir(parents=True)
    (second / "checkpoints" / "step_7").mkdir(parents=True)  # of another run: not taken
    target = second / "own" / RECEIVED / "step_7"
    assert on_ranks([(0, first), (0, second), (1, second)], fetch) == [first / "checkpoints" / "step_7", target, target]
    expected = contents(first / "checkpoints" / "step_7")
    del expected["groups.bin"]
    assert contents(target) == expected
    assert not stale.exists()
    on_ranks([(0, first), (0, second), (1, second)], lambda group, out: discard(group, out / "own"))
    assert not (second / "own" / RECEIVED).exists()


def test_a_host_that_cannot_write_stops_all_with_its_reason(first, tmp_path):
    second = tmp_path / "second"
    second.mkdir()
    (second / "own").write_text("a file is in the way")
    found = on_ranks([(0, first), (0, second)], fetch)
    assert all(isinstance(error, AsyncRLError) for error in found)
    assert "the log of another rank says why" in str(found[0])
    assert "own/received/step_7/empty: Not a directory" in str(found[1])


def test_names_that_lead_out_of_the_folder_are_refused(first, tmp_path, monkeypatch):
    monkeypatch.setattr(shipping, "_files", lambda folder: [("../../x", 3)])
    found = on_ranks([(0, first), (0, tmp_path / "second")], fetch)
    assert all("names a file outside its checkpoint: '../../x'" in str(error) for error in found)
