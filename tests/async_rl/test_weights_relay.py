"""Chunks from other hosts and differences to what is held: over real loopback sockets, with peers that fail."""

import contextlib
import os
import threading
import time
import uuid
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from async_rl.errors import WeightsError
from async_rl.weights import links
from async_rl.weights.delta import encode
from async_rl.weights.filling import MOST_FRAMES, Base, Filling
from async_rl.weights.manifest import Manifest, Tensor, chunk_checksums, combine
from async_rl.weights.pull import Pull
from async_rl.weights.puller import Puller, TransferError
from async_rl.weights.segment import Segment, segment_path, unlink_run
from async_rl.weights.server import WeightServer
from async_rl.weights.tree import Parent
from async_rl.wire import pack_header, unpack_header

CHUNK = 4000
NUM_CHUNKS = 20
NBYTES = NUM_CHUNKS * CHUNK - 4
NUMEL = NBYTES // 4


def manifest_of(run_id, version, data, slot="0"):
    chunks = chunk_checksums(memoryview(data), CHUNK)
    return Manifest(
        version=version,
        run_id=run_id,
        tensors=(Tensor("w", "float32", (NUMEL,), 0),),
        nbytes=NBYTES,
        chunk_bytes=CHUNK,
        chunks=chunks,
        checksum=combine(chunks),
        segment=str(segment_path(run_id, slot)),
        host="",
    )


def numbers(version):
    random = np.random.default_rng(0)
    return (random.normal(0, 0.02, NUMEL).astype("<f4") + np.float32(1e-8 * version)).tobytes()


class World:
    def __init__(self):
        self.run_id = f"test-{uuid.uuid4().hex[:8]}"
        self.stack = contextlib.ExitStack()
        self.stop = os.eventfd(0)
        self.slots = {}

    def server(self, **options):
        server = WeightServer("tcp://127.0.0.1:*", **options)
        server.start()
        self.stack.callback(server.close)
        return server

    def publish(self, server, version, data=None, slot=None):
        data, slot = data or numbers(version), slot or str(version % 2)
        if slot not in self.slots:
            self.slots[slot] = Segment(self.run_id, slot, NBYTES)
        self.slots[slot].data[:] = data
        manifest = manifest_of(self.run_id, version, data, slot)
        server.serve(manifest)
        return manifest

    def puller(self, learner, *parents, stall_s=0.2):
        puller = Puller(learner.address if isinstance(learner, WeightServer) else learner, self.stop, stall_s)
        puller.parents = tuple(Parent(address, 0) for address in parents)
        self.stack.callback(puller.close)
        return puller

    def close(self):
        self.stack.close()
        os.close(self.stop)
        unlink_run(self.run_id)


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


def empty(manifest, **options):
    return Filling(manifest, memoryview(bytearray(manifest.nbytes)), **options)


def is_there(filling, data):
    return filling.complete and bytes(filling.data) == data


def give(filling, data, *chunks):
    """Put chunks into it as if they had come."""
    for chunk in chunks:
        assert filling.take(chunk, [filling.manifest.chunk(memoryview(data), chunk)], differences=False)


def test_chunks_are_sent_on_while_the_rest_still_comes(world):
    learner, relay = world.server(), world.server(patient=True)
    manifest = world.publish(learner, 3)
    half, mine = empty(manifest), empty(manifest)
    give(half, numbers(3), *range(10))
    relay.share(half)
    puller = world.puller(learner, relay.address, stall_s=5.0)
    thread = threading.Thread(target=puller.fill, args=(mine,))
    thread.start()
    deadline = time.monotonic() + 5
    while mine.num_done < 10 and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    assert mine.num_done == 10  # those that the relay has; it has been asked for the others, and waits
    give(half, numbers(3), *range(10, NUM_CHUNKS))
    relay.news()
    thread.join(5)
    assert is_there(mine, numbers(3))
    assert learner.counts["bytes"] == 0
    assert relay.counts["bytes"] == NBYTES


def test_a_relay_may_be_asked_before_it_knows_of_the_version(world):
    learner, relay = world.server(), world.server(patient=True)
    manifest = world.publish(learner, 3)
    mine = empty(manifest)
    thread = threading.Thread(target=world.puller(learner, relay.address, stall_s=5.0).fill, args=(mine,))
    thread.start()
    relay.share(Filling.whole(manifest, memoryview(numbers(3))))
    thread.join(5)
    assert is_there(mine, numbers(3))
    assert learner.counts["bytes"] == 0


def test_stripes_come_from_their_parents_and_the_learner(world):
    learner, relay = world.server(), world.server(patient=True)
    manifest = world.publish(learner, 1)
    relay.share(Filling.whole(manifest, memoryview(numbers(1))))
    mine, puller = empty(manifest), world.puller(learner, "", relay.address)
    puller.fill(mine)
    assert is_there(mine, numbers(1))
    assert (learner.counts["served"], relay.counts["served"]) == (10, 10)
    assert puller.counts == {
        "learner_bytes": 10 * CHUNK,
        "relay_bytes": 10 * CHUNK - 4,
        "chunks": 20,
        "delta_chunks": 0,
    }


def test_a_version_that_a_relay_no_longer_has_comes_from_the_learner(world):
    learner, relay = world.server(), world.server(patient=True)
    manifest = world.publish(learner, 1)
    later = replace(manifest, version=2)
    relay.share(Filling.whole(later, memoryview(numbers(1))))
    mine, puller = empty(manifest), world.puller(learner, relay.address)
    puller.fill(mine)
    assert is_there(mine, numbers(1))
    assert (puller.counts["relays_left"], learner.counts["served"]) == (1, NUM_CHUNKS)


def test_a_parent_that_does_not_answer_or_cannot_be_reached_is_left_for_the_learner(world):
    learner = world.server()
    manifest = world.publish(learner, 1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        mute.linger = 0
        port = mute.bind_to_random_port("tcp://127.0.0.1")
        puller = world.puller(learner, f"tcp://127.0.0.1:{port}", "tcp://127.0.0.1:1", "nonsense", stall_s=0.1)
        mine = empty(manifest)
        puller.fill(mine)
    assert is_there(mine, numbers(1))
    assert puller.counts["relays_left"] >= 3


def test_a_relay_that_dies_in_the_middle_is_left_at_once(world):
    learner, relay = world.server(), WeightServer("tcp://127.0.0.1:*", patient=True)
    relay.start()
    manifest = world.publish(learner, 3)
    half, mine = empty(manifest), empty(manifest)
    give(half, numbers(3), *range(10))
    relay.share(half)
    puller = world.puller(learner, relay.address, stall_s=30.0)
    thread = threading.Thread(target=puller.fill, args=(mine,))
    thread.start()
    deadline = time.monotonic() + 5
    while mine.num_done < 10 and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    relay.close()
    thread.join(10)  # it would be patient for a minute
    assert is_there(mine, numbers(3))
    assert (learner.counts["served"], puller.counts["relays_left"]) == (10, 1)


def test_a_relay_that_was_given_up_is_not_asked_again_for_a_while(world, monkeypatch, capsys):
    learner, nobody = world.server(), "tcp://127.0.0.1:1"
    puller = world.puller(learner, nobody, stall_s=5.0)
    for version in (1, 2):
        mine = empty(world.publish(learner, version))
        puller.fill(mine)
        assert is_there(mine, numbers(version))
    assert puller.counts["relays_left"] == 1
    assert capsys.readouterr().out.count(f"weights: {nobody} is asked for nothing for 60 s") == 1
    now = time.monotonic()
    monkeypatch.setattr("async_rl.weights.puller.time.monotonic", lambda: now + 61)
    assert puller._fit_parents() == puller.parents


class Mute:
    """Stands for a socket and its watch."""

    def send(self, request):
        pass

    def get_monitor_socket(self, events):
        return self

    def disable_monitor(self):
        pass

    def close(self):
        pass


@pytest.mark.parametrize(("parents", "slow_at"), [(("", "tcp://r:1"), 3.9), (("", *["tcp://r:1"] * 3), 8.0)])
def test_a_relay_is_slow_that_takes_twice_as_long_for_its_chunks_as_another(parents, slow_at, monkeypatch):
    now = 100.0
    monkeypatch.setattr("async_rl.weights.pull.time.monotonic", lambda: now)
    manifest = manifest_of("r", 1, numbers(1))
    mine = empty(manifest)
    pull = Pull(mine, "", tuple(Parent(p, 0) for p in parents), 1.0, lambda *_, **__: Mute(), Counter())
    learner, relay = pull.sources

    def come(source, chunk):
        said = pack_header({"type": "chunk", "version": 1, "chunk": chunk})
        parts = [
            SimpleNamespace(buffer=memoryview(part)) for part in (said, manifest.chunk(memoryview(numbers(1)), chunk))
        ]
        assert pull.receive(source, parts)

    for source in (learner, relay):
        pull.ask(source)
    now += 0.95 if len(parents) == 2 else 1.0
    for chunk in sorted(learner.asked):
        come(learner, chunk)
    # 10 chunks in 0.95 s: the relay has 1.9 s for its 10 and its patience of two stalls; 5 in 1 s: 6 s for its 15
    chunks = iter(sorted(relay.asked))
    while now + 1 < 100 + slow_at:
        now += 1
        come(relay, next(chunks))
        pull.look(now)
    pull.look(100 + slow_at - 0.01)
    assert pull.sources == [learner, relay]
    pull.look(100 + slow_at + 0.01)
    assert pull.sources == [learner]
    assert "times as slow" in pull.unfit["tcp://r:1"]


def test_wrong_bytes_of_a_relay_are_asked_for_again_of_the_learner(world):
    learner, relay = world.server(), world.server(patient=True)
    manifest = world.publish(learner, 1)
    wrong = bytearray(numbers(1))
    wrong[7 * CHUNK] ^= 1
    relay.share(Filling.whole(manifest, memoryview(wrong)))
    mine, puller = empty(manifest), world.puller(learner, relay.address)
    puller.fill(mine)
    assert is_there(mine, numbers(1))
    assert puller.counts["relays_left"] == 1
    assert 1 <= learner.counts["served"] <= NUM_CHUNKS


def test_a_broken_transfer_goes_on_with_what_is_missing_from_another_parent(world):
    learner, relay = world.server(), world.server(patient=True)
    manifest = world.publish(learner, 1)
    half, mine = empty(manifest), empty(manifest)
    give(half, numbers(1), *range(0, NUM_CHUNKS, 2))
    relay.share(half)
    nobody = "tcp://127.0.0.1:1"
    with pytest.raises(TransferError, match="10 of 20 chunks arrived"):
        world.puller(nobody, relay.address, stall_s=0.1).fill(mine)
    world.puller(learner, stall_s=0.1).fill(mine)
    assert is_there(mine, numbers(1))
    assert learner.counts["served"] == 10


def test_requests_for_impossible_chunks_of_coming_versions_harm_nobody(world):
    relay = world.server(patient=True)
    manifest = manifest_of(world.run_id, 3, numbers(3))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(relay.address)
        for chunk in (10**9, -1, 0):
            socket.send(pack_header({"type": "get", "version": 3, "chunk": chunk}))
        socket.send(pack_header({"type": "get", "version": 3, "chunk": 0, "base": 7}))
        socket.send(pack_header({"type": "get", "version": 2, "chunk": 0}))
        deadline = time.monotonic() + 5
        while relay.counts["malformed"] < 1 and time.monotonic() < deadline:
            threading.Event().wait(0.005)
        relay.share(Filling.whole(manifest, memoryview(numbers(3))))
        answers = []
        while len(answers) < 2 and socket.poll(5000):
            answers.append(unpack_header(socket.recv_multipart()[0]))
    assert sorted(answer["type"] for answer in answers) == ["chunk", "gone"]
    assert relay.counts["malformed"] == 3


def test_one_peer_does_not_take_the_place_of_those_who_wait(world):
    relay = world.server(patient=True)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(relay.address)
        for chunk in range(200):
            socket.send(pack_header({"type": "get", "version": 3, "chunk": chunk}))
        deadline = time.monotonic() + 5
        while relay.counts["dropped"] < 72 and time.monotonic() < deadline:
            threading.Event().wait(0.005)
    assert relay.counts["dropped"] == 200 - 128
    assert len(relay._waiting) == 128


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_thread_has_failed_says_so_at_the_next_version(world, monkeypatch):
    learner = world.server()
    manifest = world.publish(learner, 1)
    monkeypatch.setattr(learner._shelf, "answer", lambda header: 1 / 0)
    with pytest.raises(TransferError, match="no_progress"):
        world.puller(learner, stall_s=0.05).fill(empty(manifest))
    with pytest.raises(WeightsError, match="thread has failed"):
        world.publish(learner, 2)


# -- differences


def held(version, manifest):
    return Base(manifest.checksum, memoryview(numbers(version)))


def test_who_holds_the_version_before_gets_differences_and_the_same_bits(world):
    learner = world.server(delta=True)
    before, manifest = world.publish(learner, 1), world.publish(learner, 2)
    mine = empty(manifest)
    mine.lead_from(held(1, before))
    world.puller(learner).fill(mine)
    assert is_there(mine, numbers(2))
    assert learner.counts["differences"] == NUM_CHUNKS
    assert learner.counts["bytes"] < NBYTES / 2  # float32: the upper two planes are zeros


def test_who_has_skipped_versions_gets_one_difference_after_the_other(world):
    learner = world.server(delta=True)
    manifests = [world.publish(learner, 0)]
    for version in range(1, 4):  # somebody follows each version: its differences are made
        manifests.append(world.publish(learner, version))
        other = empty(manifests[version])
        other.lead_from(held(version - 1, manifests[version - 1]))
        world.puller(learner).fill(other)
    made = learner.counts["differences"]
    mine = empty(manifests[3])
    mine.lead_from(held(1, manifests[1]))
    world.puller(learner).fill(mine)
    assert is_there(mine, numbers(3))
    assert learner.counts["differences"] == made + NUM_CHUNKS


def test_differences_that_were_not_made_in_time_or_are_too_old_are_not_sent(world):
    learner = world.server(delta=True)
    manifests = [world.publish(learner, version) for version in range(MOST_FRAMES + 3)]
    for old in (0, MOST_FRAMES):  # forgotten; and its slot was written over before anybody asked
        mine = empty(manifests[-1])
        mine.lead_from(held(old, manifests[old]))
        world.puller(learner).fill(mine)
        assert is_there(mine, numbers(MOST_FRAMES + 2))
    assert learner.counts["differences"] == 0


def test_a_base_that_is_not_what_it_says_leads_to_the_whole_chunk(world):
    learner = world.server(delta=True)
    before, manifest = world.publish(learner, 1), world.publish(learner, 2)
    mine, puller = empty(manifest), world.puller(learner)
    mine.lead_from(Base(before.checksum, memoryview(bytes(NBYTES))))
    puller.fill(mine)
    assert is_there(mine, numbers(2))
    assert puller.counts["failed_deltas"] == NUM_CHUNKS  # all of them led to wrong bytes


def test_a_newer_version_that_is_written_over_meanwhile_leads_nowhere(world):
    learner = world.server(delta=True)
    before = world.publish(learner, 1, slot="eval")  # stays
    for version in (2, 3):
        world.publish(learner, version)
    manifest = world.publish(learner, 4)  # over version 2, which nobody has asked for
    mine, puller = empty(manifest), world.puller(learner)
    mine.lead_from(held(1, before))
    puller.fill(mine)
    assert is_there(mine, numbers(4))
    assert puller.counts["failed_deltas"] == 0
    assert learner.counts["differences"] == 0


def test_a_base_that_is_written_over_while_it_is_read_leads_nowhere(world, monkeypatch):
    learner = world.server(delta=True)
    before, manifest = world.publish(learner, 1), world.publish(learner, 2)

    def written_over(base, new, itemsize):
        frame = encode(base, new, itemsize)
        world.slots["1"].data[:] = numbers(3)
        return frame

    monkeypatch.setattr(links, "encode", written_over)
    mine, puller = empty(manifest), world.puller(learner)
    mine.lead_from(held(1, before))
    puller.fill(mine)
    assert is_there(mine, numbers(2))
    assert (puller.counts["failed_deltas"], puller.counts["delta_chunks"]) == (0, 0)


def test_others_are_served_while_differences_are_made(world, monkeypatch):
    learner, go_on = world.server(delta=True), threading.Event()
    before, manifest = world.publish(learner, 1), world.publish(learner, 2)
    monkeypatch.setattr(links, "encode", lambda *given: (go_on.wait(20), encode(*given))[1])
    mine, other = empty(manifest), empty(manifest)
    mine.lead_from(held(1, before))
    thread = threading.Thread(target=world.puller(learner, stall_s=20.0).fill, args=(mine,))
    thread.start()
    try:
        world.puller(learner, stall_s=5.0).fill(other)
        assert is_there(other, numbers(2))
        assert mine.num_done == 0
    finally:
        go_on.set()
        thread.join(10)
    assert is_there(mine, numbers(2))


def test_a_version_that_is_whole_keeps_no_base_in_memory():
    held = np.frombuffer(numbers(1), np.uint8).copy()
    alive, mine = weakref.ref(held), empty(manifest_of("r", 2, numbers(2)))
    mine.lead_from(Base("base", held.data))
    del held
    give(mine, numbers(2), *range(NUM_CHUNKS - 1))
    assert alive() is not None
    give(mine, numbers(2), NUM_CHUNKS - 1)
    assert alive() is None


def test_endless_differences_are_refused():
    manifest = manifest_of("r", 2, numbers(1))
    nothing = memoryview(encode(memoryview(numbers(1))[:CHUNK], memoryview(numbers(1))[:CHUNK], 4))
    for count, is_good in ((MOST_FRAMES, True), (MOST_FRAMES + 1, False)):
        filling = empty(manifest)
        filling.lead_from(Base("base", memoryview(numbers(1))))
        assert filling.take(0, [nothing] * count, differences=True) is is_good


def test_numbers_of_two_kinds_are_compared_as_halves():
    kinds = (Tensor("a", "float32", (999,), 0), Tensor("b", "bfloat16", (1,), 3996))
    fillings = []
    for version in (1, 2):
        data = bytes(3996) + bytes([version, 0])
        chunks = chunk_checksums(memoryview(data), CHUNK)
        made = manifest_of("r", version, numbers(1))
        made = replace(made, tensors=kinds, nbytes=3998, chunks=chunks, checksum=combine(chunks))
        fillings.append(Filling.whole(made, memoryview(data)))
    links.link(*fillings)
    [frame] = fillings[1].frames(0, fillings[0].manifest.checksum)
    assert frame[0] == 2  # 3,998 bytes are no whole number of float32


def test_a_relay_sends_the_differences_on_that_it_got(world):
    learner, relay = world.server(delta=True), world.server(patient=True)
    before, manifest = world.publish(learner, 1), world.publish(learner, 2)
    near, far, stranger = empty(manifest, keep=True), empty(manifest), empty(manifest)
    for filling in (near, far):
        filling.lead_from(held(1, before))
    world.puller(learner).fill(near)
    relay.share(near)
    sent = learner.counts["bytes"]
    world.puller(learner, relay.address).fill(far)
    assert is_there(far, numbers(2))
    assert (relay.counts["differences"], relay.counts["bytes"]) == (NUM_CHUNKS, sent)
    stranger.lead_from(Base("another", memoryview(bytes(NBYTES))))
    world.puller(learner, relay.address).fill(stranger)
    assert is_there(stranger, numbers(2))
    assert learner.counts["bytes"] == sent
