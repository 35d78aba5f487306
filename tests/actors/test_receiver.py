"""The receiver over real shared memory and real loopback sockets."""

import select
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from actors.receiver import Prepared, Receiver
from async_rl.errors import WeightsError
from async_rl.weights.manifest import Manifest
from async_rl.weights.segment import Segment, unlink_run
from async_rl.weights.server import WeightServer
from learner.publisher import Publisher

NUMEL = 5000
NOWHERE = "tcp://127.0.0.1:1"


class World:
    """A publisher and a chunk server, and receivers that are closed at the end."""

    def __init__(self) -> None:
        self.run_id = f"test-{uuid.uuid4().hex[:8]}"
        self.publisher = Publisher(self.run_id, [("w", (NUMEL,), 0, NUMEL)], chunk_bytes=1000)
        self.server = WeightServer("tcp://127.0.0.1:*")
        self.server.start()
        self.receivers: list[Receiver] = []

    def publish(self, version: int, evaluated: bool = False, epoch: int = 0) -> Manifest:
        flat = torch.full((NUMEL,), version + 100.0 * epoch)
        manifest = replace(self.publisher.publish(flat, version, evaluated), epoch=epoch)
        self.server.serve(manifest)
        return manifest

    def receiver(self, path: str, address: str | None = None) -> Receiver:
        made = Receiver(path, lambda: address or self.server.address, self.run_id, stall_s=0.2)
        self.receivers.append(made)
        return made

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.server.close()
        self.publisher.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()
    assert unlink_run(made.run_id) == []


def value(prepared: Prepared | None) -> float:
    assert prepared is not None
    prepared.manifest.verify(prepared.data)
    return torch.frombuffer(bytearray(prepared.data), dtype=torch.float32).unique().item()


def failed(receiver: Receiver, reason: str, times: int = 1) -> None:
    deadline = time.monotonic() + 10
    while receiver.failures[reason] < times:
        assert time.monotonic() < deadline, receiver.failures
        assert receiver.wait(0.01) is None


@pytest.mark.parametrize("path", ["shm", "zmq", "auto"])
def test_a_version_arrives_whole(world: World, path: str):
    receiver = world.receiver(path)
    receiver.fetch(world.publish(7))
    prepared = receiver.wait(10)
    assert value(prepared) == 7
    assert prepared is not None
    assert prepared.path == ("zmq" if path == "zmq" else "shm")
    assert prepared.transfer_s > 0
    assert receiver.ready() is None  # handed out once


def test_shared_memory_is_mapped_and_not_copied(world: World):
    receiver = world.receiver("shm")
    manifest = world.publish(0)
    receiver.fetch(manifest)
    prepared = receiver.wait(10)
    assert prepared is not None
    Segment(world.run_id, "0", manifest.nbytes).data[:4] = b"seen"
    assert bytes(prepared.data[:4]) == b"seen"


def test_another_hosts_version_comes_over_the_network(world: World):
    receiver = world.receiver("auto")
    receiver.fetch(replace(world.publish(3), host="elsewhere"))
    prepared = receiver.wait(10)
    assert value(prepared) == 3
    assert prepared is not None
    assert prepared.path == "zmq"


def test_the_descriptor_is_readable_until_the_version_is_taken(world: World):
    receiver = world.receiver("auto")
    assert select.select([receiver.fileno()], [], [], 0)[0] == []
    receiver.fetch(world.publish(0))
    assert select.select([receiver.fileno()], [], [], 10)[0] == [receiver.fileno()]
    assert receiver.ready() is not None
    assert select.select([receiver.fileno()], [], [], 0)[0] == []


@pytest.mark.parametrize("path", ["shm", "zmq"])
def test_the_newest_wins_and_an_older_version_is_dropped(world: World, path: str):
    receiver = world.receiver(path)
    older, newest = world.publish(4), world.publish(5)
    receiver.fetch(newest)
    receiver.fetch(older)
    assert value(receiver.wait(10)) == 5
    receiver.fetch(older)
    assert receiver.wait(0.2) is None
    assert not receiver.failures


def test_the_same_version_can_be_fetched_again_after_it_was_taken(world: World):
    receiver = world.receiver("shm")
    manifest = world.publish(1)
    for _ in range(2):  # the engine's read-back failed: once more
        receiver.fetch(manifest)
        assert value(receiver.wait(10)) == 1


@pytest.mark.parametrize("path", ["shm", "zmq"])
def test_a_newer_version_with_the_same_bytes_is_a_version_of_its_own(world: World, path: str):
    receiver = world.receiver(path)
    flat = torch.ones(NUMEL)
    for version in range(2):
        manifest = world.publisher.publish(flat, version, evaluated=False)
        world.server.serve(manifest)
        receiver.fetch(manifest)
    versions = []
    while 1 not in versions:
        prepared = receiver.wait(10)
        assert prepared is not None
        versions.append(prepared.manifest.version)


@pytest.mark.parametrize(("path", "reason"), [("shm", "superseded"), ("zmq", "corrupted")])
def test_a_corrupted_byte_is_refused_and_its_chunk_named(world: World, path: str, reason: str):
    receiver = world.receiver(path)
    manifest = world.publish(2)
    Segment(world.run_id, "0", manifest.nbytes).data[12_345] ^= 1
    receiver.fetch(manifest)
    failed(receiver, reason)
    assert "version 2: chunk 12 " in receiver.last_failure


@pytest.mark.parametrize("path", ["shm", "zmq"])
def test_an_overwritten_slot_is_superseded_and_the_next_version_arrives(world: World, path: str):
    receiver = world.receiver(path)
    old = world.publish(0)
    new = world.publish(2)  # over version 0
    receiver.fetch(old)
    failed(receiver, "superseded")
    receiver.fetch(new)
    assert value(receiver.wait(10)) == 2


def test_a_late_joiner_pulls_the_newest(world: World):
    manifests = [world.publish(version) for version in range(5)]
    receiver = world.receiver("zmq")
    receiver.fetch(manifests[-1])
    assert value(receiver.wait(10)) == 4


def test_an_evaluated_version_is_still_there_many_versions_later(world: World):
    evaluated = world.publish(0, evaluated=True)
    for version in range(1, 6):
        world.publish(version)
    for path in ("shm", "zmq"):
        receiver = world.receiver(path)
        receiver.fetch(evaluated)
        assert value(receiver.wait(10)) == 0


def test_four_receivers_follow_a_publisher(world: World):
    receivers = [world.receiver(path) for path in ("shm", "zmq", "zmq", "auto")]
    for version in range(6):
        manifest = world.publish(version)
        for receiver in receivers:
            receiver.fetch(manifest)
        assert [value(r.wait(10)) for r in receivers] == [version] * 4
    assert not any(r.failures for r in receivers)


def test_received_bytes_stay_until_the_next_version_is_taken(world: World):
    receiver = world.receiver("zmq")
    receiver.fetch(world.publish(1))
    first = receiver.wait(10)
    receiver.fetch(world.publish(2))
    assert select.select([receiver.fileno()], [], [], 10)[0]  # version 2 is ready, in the other buffer
    receiver.fetch(world.publish(3))  # has no buffer before version 2 is taken
    assert value(first) == 1
    second = receiver.wait(10)
    assert value(second) == 2
    assert value(receiver.wait(10)) == 3
    assert second is not None
    assert value(second) == 2  # version 3 went into the buffer of version 1


def test_a_version_that_waits_for_a_buffer_gives_way_to_a_newer_one(world: World):
    receiver = world.receiver("zmq")
    for version in (1, 2):
        receiver.fetch(world.publish(version))
        assert select.select([receiver.fileno()], [], [], 10)[0]
        if version == 1:
            assert value(receiver.ready()) == 1
    receiver.fetch(world.publish(3))
    receiver.fetch(world.publish(4))
    assert value(receiver.wait(10)) == 2
    assert value(receiver.wait(10)) == 4
    assert receiver.wait(0.1) is None


def test_a_version_that_the_server_does_not_hold_yet_is_tried_again(world: World):
    receiver = world.receiver("zmq")
    manifest = world.publisher.publish(torch.zeros(NUMEL), 0, evaluated=False)
    receiver.fetch(manifest)
    failed(receiver, "superseded")
    world.server.serve(manifest)
    assert value(receiver.wait(10)) == 0


@pytest.mark.parametrize("path", ["shm", "zmq"])
def test_a_later_epoch_is_newer_whatever_its_version_and_the_same_number_is_fetched_again(world: World, path: str):
    receiver = world.receiver(path)
    for version in (4, 5, 7):
        receiver.fetch(world.publish(version))
        assert value(receiver.wait(10)) == version
    receiver.fetch(world.publish(4, epoch=1))
    assert value(receiver.wait(10)) == 104
    receiver.fetch(world.publish(5, epoch=1))
    assert value(receiver.wait(10)) == 105
    receiver.fetch(world.publish(8))  # of the epoch before: void
    assert receiver.wait(0.1) is None


def test_a_void_version_that_was_prepared_is_not_handed_out(world: World):
    receiver = world.receiver("zmq")
    receiver.fetch(world.publish(7))
    assert select.select([receiver.fileno()], [], [], 10)[0]
    receiver.fetch(world.publish(4, epoch=1))
    assert value(receiver.wait(10)) == 104
    assert receiver.wait(0.1) is None


def test_chunks_of_two_epochs_are_told_apart_although_their_versions_are_equal(world: World):
    world.publish(5, evaluated=True)
    receiver = world.receiver("zmq")
    receiver.fetch(world.publish(5, epoch=1))
    assert value(receiver.wait(10)) == 105
    assert not receiver.failures


def test_a_server_that_moved_is_found_at_its_new_address(world: World):
    addresses = [NOWHERE]
    receiver = Receiver("zmq", lambda: addresses[-1], world.run_id, stall_s=0.1)
    world.receivers.append(receiver)
    receiver.fetch(world.publish(1))
    failed(receiver, "no_progress")
    addresses.append(world.server.address)
    assert value(receiver.wait(10)) == 1


def test_a_missing_segment_is_a_failure_with_shm_and_falls_back_with_auto(world: World):
    manifest = world.publish(0)
    unlink_run(world.run_id)
    shm, auto = world.receiver("shm"), world.receiver("auto")
    shm.fetch(manifest)
    failed(shm, "no_segment")
    assert "weights.path" in shm.last_failure
    auto.fetch(manifest)
    prepared = auto.wait(10)
    assert prepared is not None
    assert prepared.path == "zmq"


def test_a_silent_server_is_a_failure_and_close_does_not_wait_for_it(world: World):
    receiver = world.receiver("zmq", NOWHERE)
    receiver.fetch(world.publish(0))
    failed(receiver, "no_progress")
    assert NOWHERE in receiver.last_failure
    receiver.fetch(world.publish(1))
    began = time.monotonic()
    receiver.close()
    assert time.monotonic() - began < 0.2 * 3  # less than the transfer would take to give up


def test_close_ends_a_wait_for_a_buffer(world: World):
    receiver = world.receiver("zmq")
    for version in (1, 2):
        receiver.fetch(world.publish(version))
        assert select.select([receiver.fileno()], [], [], 10)[0]
        if version == 1:
            receiver.ready()
    receiver.fetch(world.publish(3))
    receiver.close()


def test_a_version_of_another_run_is_refused(world: World):
    with pytest.raises(WeightsError, match="'other'"):
        world.receiver("auto").fetch(replace(world.publish(0), run_id="other"))


def test_a_fault_in_the_thread_reaches_the_actor(world: World, monkeypatch: pytest.MonkeyPatch):
    receiver = world.receiver("shm")
    monkeypatch.setattr(receiver, "_map", lambda manifest: 1 / 0)
    receiver.fetch(world.publish(0))
    with pytest.raises(WeightsError, match="thread failed") as caught:
        receiver.wait(10)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
