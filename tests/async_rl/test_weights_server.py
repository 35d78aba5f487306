"""Chunk server and puller over real loopback sockets."""

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from async_rl.errors import WeightsError
from async_rl.weights.manifest import Manifest, chunk_checksums, combine
from async_rl.weights.puller import Puller, TransferError
from async_rl.weights.segment import Segment, segment_path, unlink_run
from async_rl.weights.server import WeightServer
from async_rl.wire import pack_header, unpack_header

CHUNK = 1000
NBYTES = 100 * CHUNK - 1


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    unlink_run(name)


@pytest.fixture
def server() -> Iterator[WeightServer]:
    server = WeightServer("tcp://127.0.0.1:*")
    server.start()
    yield server
    server.close()


@contextmanager
def puller(address: str, stall_s: float = 0.3) -> Iterator[Puller]:
    stop = os.eventfd(0)
    made = Puller(address, stop, stall_s)
    try:
        yield made
    finally:
        made.close()
        os.close(stop)


def publish(run_id: str, version: int, slot: str) -> tuple[Manifest, bytes]:
    data = os.urandom(NBYTES)
    Segment(run_id, slot, NBYTES).data[:] = data
    chunks = chunk_checksums(memoryview(data), CHUNK)
    manifest = Manifest(
        version=version,
        run_id=run_id,
        tensors=(),
        nbytes=NBYTES,
        chunk_bytes=CHUNK,
        chunks=chunks,
        checksum=combine(chunks),
        segment=str(segment_path(run_id, slot)),
        host="",
    )
    return manifest, data


def pull(address: str, manifest: Manifest) -> bytes:
    into = memoryview(bytearray(manifest.nbytes))
    with puller(address) as made:
        made.pull(manifest, into)
    return bytes(into)


def test_every_byte_arrives(server: WeightServer, run_id: str):
    manifest, data = publish(run_id, 0, "0")
    server.serve(manifest)
    assert pull(server.address, manifest) == data
    assert server.counts["served"] == 100


def test_three_versions_are_held_at_once(server: WeightServer, run_id: str):
    published = [publish(run_id, version, slot) for version, slot in [(5, "1"), (6, "0"), (4, "eval")]]
    for manifest, _ in published:
        server.serve(manifest)
    for manifest, data in published:
        assert pull(server.address, manifest) == data


def test_a_version_whose_slot_was_written_over_is_gone(server: WeightServer, run_id: str):
    old, _ = publish(run_id, 1, "1")
    server.serve(old)
    new, data = publish(run_id, 3, "1")
    server.serve(new)
    with pytest.raises(TransferError, match="version 1 is no longer held, the newest is 3") as caught:
        pull(server.address, old)
    assert caught.value.reason == "superseded"
    assert pull(server.address, new) == data


def test_nothing_is_held_before_the_first_version(server: WeightServer, run_id: str):
    manifest, _ = publish(run_id, 0, "0")
    with pytest.raises(TransferError, match="the newest is -1"):
        pull(server.address, manifest)


def test_an_overwritten_chunk_is_asked_for_again_and_then_named(server: WeightServer, run_id: str):
    manifest, _ = publish(run_id, 0, "0")
    server.serve(manifest)
    Segment(run_id, "0", NBYTES).data[7 * CHUNK] ^= 1
    with pytest.raises(TransferError, match="chunk 7 came 4 times with wrong bytes") as caught:
        pull(server.address, manifest)
    assert caught.value.reason == "corrupted"


def test_malformed_requests_are_counted_and_the_server_goes_on(server: WeightServer, run_id: str):
    manifest, data = publish(run_id, 0, "0")
    server.serve(manifest)
    requests: list[list[bytes]] = [
        [b""],
        [b"\xff garbage"],
        [pack_header({"type": "get"})],
        [pack_header({"type": "put", "version": 0, "chunk": 0})],
        [pack_header({"type": "get", "version": "0", "chunk": 0})],
        [pack_header({"type": "get", "version": 0, "chunk": True})],
        [pack_header({"type": "get", "version": 0, "chunk": 100})],
        [pack_header({"type": "get", "version": 0, "chunk": -1})],
        [pack_header({"type": "get", "version": 0, "chunk": 0}), b"more"],
    ]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(server.address)
        for request in requests:
            socket.send_multipart(request)
        socket.send(pack_header({"type": "get", "version": 0, "chunk": 99}))  # in order: answered after all the others
        assert socket.poll(5000)
        header, frame = socket.recv_multipart()
        assert unpack_header(header) == {"type": "chunk", "version": 0, "chunk": 99}
        assert frame == data[99 * CHUNK :]
    assert server.counts["malformed"] == len(requests)


def test_a_peer_that_never_reads_loses_answers_and_holds_nobody_up(server: WeightServer, run_id: str):
    manifest = big_version(run_id)
    server.serve(manifest)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, 1)
        socket.connect(server.address)
        for _ in range(1000):  # 1 GB asked for
            socket.send(pack_header({"type": "get", "version": 0, "chunk": 0}))
        assert pull(server.address, manifest) == bytes(1 << 20)
        # requests of two peers may be taken in turns: go on until all thousand were dealt with
        while server.counts["served"] < 1001:
            assert pull(server.address, manifest) == bytes(1 << 20)
        assert server.counts["dropped"] > 500


def big_version(run_id: str) -> Manifest:
    data = bytes(1 << 20)
    Segment(run_id, "0", len(data)).data[:] = data
    chunks = chunk_checksums(memoryview(data), len(data))
    return Manifest(
        version=0,
        run_id=run_id,
        tensors=(),
        nbytes=len(data),
        chunk_bytes=len(data),
        chunks=chunks,
        checksum=combine(chunks),
        segment=str(segment_path(run_id, "0")),
        host="",
    )


def test_a_taken_port_is_an_error_that_names_it(server: WeightServer):
    second = WeightServer(server.address)
    with pytest.raises(WeightsError, match=f"cannot bind {server.address}.*in use"):
        second.start()
    second.close()


def test_a_segment_of_another_host_cannot_be_served(server: WeightServer, run_id: str):
    manifest, _ = publish(run_id, 0, "0")
    unlink_run(run_id)
    with pytest.raises(WeightsError, match="cannot open"):
        server.serve(manifest)


@contextmanager
def scripted(answer: Callable[[int, dict[str, Any]], list[Any] | None]) -> Iterator[str]:
    """A server that answers the n-th request as told; None: not at all."""
    context, stop = zmq.Context(), os.eventfd(0)
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def run() -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        count = 0
        while stop not in dict(poller.poll(30_000)):
            peer, request = socket.recv_multipart()
            parts = answer(count, unpack_header(request))
            count += 1
            if parts is not None:
                socket.send_multipart([peer, *parts])
        socket.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        os.eventfd_write(stop, 1)
        thread.join(10)
        context.destroy(linger=0)
        os.close(stop)


def good(manifest: Manifest, data: bytes, request: dict[str, Any]) -> list[Any]:
    chunk = request["chunk"]
    frame = bytes(manifest.chunk(memoryview(data), chunk))
    return [pack_header({"type": "chunk", "version": request["version"], "chunk": chunk}), frame]


def test_lost_and_damaged_answers_are_asked_for_again(run_id: str):
    manifest, data = publish(run_id, 0, "0")

    def answer(count: int, request: dict[str, Any]) -> list[Any] | None:
        parts = good(manifest, data, request)
        if count == 3:
            return None  # lost
        if count == 5:
            return [parts[0], bytes(len(parts[1]))]  # damaged
        if count == 7:
            return [parts[0], parts[1][:-1]]  # cut short
        return parts

    with scripted(answer) as address:
        assert pull(address, manifest) == data


@pytest.mark.parametrize(
    "answer",
    [
        lambda count, request: None,
        lambda count, request: [b"garbage"],
        lambda count, request: [pack_header({"type": "chunk", "chunk": 10**6}), b""],
        lambda count, request: [pack_header({"type": "chunk", "chunk": [1]}), b""],
        lambda count, request: [pack_header({"type": "chunk", "chunk": request["chunk"]})],
        lambda count, request: [pack_header({"type": "gone", "version": 77, "newest": 78})],
    ],
)
def test_a_server_that_makes_no_sense_ends_in_no_progress(
    answer: Callable[[int, dict[str, Any]], list[Any] | None], run_id: str
):
    manifest, _ = publish(run_id, 0, "0")
    with scripted(answer) as address, pytest.raises(TransferError, match="0 of 100 chunks") as caught:
        pull(address, manifest)
    assert caught.value.reason == "no_progress"


def test_an_impossible_address_is_unreachable(run_id: str):
    manifest, _ = publish(run_id, 0, "0")
    with pytest.raises(TransferError, match="nonsense") as caught:
        pull("nonsense", manifest)
    assert caught.value.reason == "unreachable"
