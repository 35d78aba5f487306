"""A real server on loopback in a thread, and clients that play actor, learner, evaluator and launcher."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from buffer_helpers import answer

from async_rl.buffer.records import Limits
from async_rl.buffer.server import Server
from async_rl.client import Client
from async_rl.config import Config, RunConfig, parse_config
from async_rl.data import Annotation, Group
from async_rl.protocol import PROTOCOL_VERSION, Ticket
from async_rl.weights.manifest import Manifest, Tensor, chunk_checksums, combine
from async_rl.wire import SCHEMA_VERSION, Frame, Header, decode_groups, pack_header, unpack_header

WAIT_S = 10.0
NUM_TASKS = 16


class NoWeights:
    """A chunk server that only remembers."""

    address = "tcp://127.0.0.1:1"

    def __init__(self) -> None:
        self.served: list[int] = []

    def serve(self, manifest: Manifest) -> None:
        self.served.append(manifest.version)


def config(**sections: dict[str, Any]) -> Config:
    raw: dict[str, Any] = {
        "steps": 3,
        "sampling": {"group_size": 2, "max_new_tokens": 4},
        "buffer": {"groups_per_step": 2, "max_staleness": 1, "heartbeat_s": 0.9, "lease_s": 30.0},
    }
    for name, section in sections.items():
        raw[name] = {**raw[name], **section} if isinstance(raw.get(name), dict) else section
    return parse_config(raw)


@contextmanager
def running(
    settings: RunConfig,
    out: Path,
    resume: Path | None = None,
    limits: Limits | None = None,
    *,
    recover: bool = False,
) -> Iterator[Server]:
    """The server's thread; ends with the run, or by force when the test is over."""
    server = Server(settings, out, limits or Limits(num_tasks=NUM_TASKS), NoWeights(), resume, recover=recover)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(server.run()), daemon=True)
    thread.start()
    server.codes, server.thread = codes, thread  # type: ignore[attr-defined]
    try:
        yield server
    finally:
        if thread.is_alive():
            server.service.ending.phase = "ended"
            server.wake()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        server.close()


def exit_code(server: Any) -> int:
    """Wait until the server has ended by itself."""
    server.thread.join(WAIT_S)
    assert not server.thread.is_alive(), "the server still runs"
    return int(server.codes[0])


def manifest(version: int, epoch: int = 0) -> Manifest:
    data = memoryview(np.full(2, version, np.float32)).cast("B")
    chunks = chunk_checksums(data, 8)
    return Manifest(
        version=version,
        run_id="r",
        tensors=(Tensor("w", "float32", (2,), 0),),
        nbytes=8,
        chunk_bytes=8,
        chunks=chunks,
        checksum=combine(chunks),
        segment="/dev/shm/none",
        host="h",
        epoch=epoch,
    )


class Peer(Client):
    """A client with what the tests need."""

    def until(self, kind: str, wanted: Callable[[Header], bool] = lambda header: True) -> tuple[Header, list[Frame]]:
        """Wait for a message; others stay for later."""
        deadline, kept, found = time.monotonic() + WAIT_S, [], None
        while found is None:
            assert time.monotonic() < deadline, f"no {kind}, only {[h['type'] for h, _ in kept]}"
            for header, frames in self.receive(0.05):
                if found is None and header["type"] == kind and wanted(header):
                    found = (header, frames)
                else:
                    kept.append((header, frames))
        self._held.extendleft(reversed(kept))
        return found

    def tickets(self, count: int) -> list[Ticket]:
        """Wait for ``count`` tickets."""
        tickets: list[Ticket] = []
        while len(tickets) < count:
            tickets += [Ticket.from_wire(t) for t in self.until("tickets")[0]["tickets"]]
        assert len(tickets) == count
        return tickets

    def submit(self, *groups: Group) -> list[list[Any]]:
        """Submit and wait for the acknowledgement."""
        self.send_groups(groups)
        return list(self.until("ack")[0]["results"])

    def leased(self, count: int) -> list[Group]:
        """Wait for ``count`` groups to score."""
        groups: list[Group] = []
        while len(groups) < count:
            groups += decode_groups(*self.until("lease"))
        assert len(groups) == count
        return groups

    def annotate(self, *annotations: Annotation) -> list[list[Any]]:
        """Send annotations and wait for the acknowledgement."""
        self.send_annotations(annotations)
        return list(self.until("ack")[0]["results"])

    def go_live(self, version: int) -> None:
        self.send("live", version=version, checksum=manifest(version).checksum, transfer_s=0.1, commit_s=0.2)

    def train(self, step: int, epoch: int = 0) -> Header:
        wire = manifest(step + 1, epoch).to_wire()
        header, _ = self.request("trained", "trained", step=step, manifest=wire, stats={})
        return header


class Cast:
    """Clients of one server, closed together."""

    def __init__(self, server: Server, settings: RunConfig) -> None:
        self._server, self._contract, self._stack = server, settings.contract_hash(), ExitStack()

    def __enter__(self) -> Cast:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def join(self, role: Any, name: str, **fields: Any) -> Peer:
        peer = self._stack.enter_context(Peer(self._server.address, role, name, self._contract, **fields))
        peer.connect(WAIT_S)
        return peer

    def learner(self, rank: int = 0, world: int = 1, start: int | None = 0, group: str = "g", epoch: int = 0) -> Peer:
        """A learner rank; rank 0 publishes the start version."""
        peer = self.join("learner", f"learner{rank}", rank=rank, world=world, step=start or 0, group=group)
        if rank == 0 and start is not None:
            wire = manifest(start, epoch).to_wire()
            peer.request("trained", "trained", step=-1, manifest=wire, stats={})
        return peer

    def actor(self, name: str = "a", credit: int = 8, live: int | None = 0) -> Peer:
        peer = self.join("actor", name)
        if live is not None:
            peer.go_live(live)
        if credit:
            peer.send("credit", count=credit)
        return peer

    def scorer(self, name: str = "s", stage: str = "reward", credit: int = 8) -> Peer:
        peer = self.join("scorer", name, stage=stage)
        if credit:
            peer.send("credit", count=credit)
        return peer


def finish(actor: Peer, tickets: list[Ticket]) -> None:
    """Submit a proper group for each ticket."""
    for ticket in tickets:
        assert actor.submit(answer(ticket))[0][2] == "accepted"


def run_steps(learner: Peer, actor: Peer, first: int, last: int) -> None:
    """Train steps ``first`` to ``last - 1``; every ticket is answered."""
    for step in range(first, last):
        learner.send("next", step=step)
        while True:
            arrived = {h["type"]: h for h, _ in learner.receive(0.02)}
            if "shard" in arrived:
                break
            for header, _ in actor.receive(0.02):
                if header["type"] == "tickets":
                    actor.send_groups([answer(Ticket.from_wire(t)) for t in header["tickets"]])
        learner.train(step)
        actor.go_live(step + 1)


class Raw:
    """A bare DEALER, for what :class:`Client` would never send."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(0)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def ask(self, *frames: bytes) -> Header:
        """Send, and wait for the answer; beats are passed over."""
        self.send(*frames)
        return self.answer()

    def answer(self) -> Header:
        while self._socket.poll(WAIT_S * 1000):
            header = unpack_header(self._socket.recv_multipart()[0])
            if header["type"] not in ("beat", "status"):
                return header
        raise AssertionError("no answer")

    def silent(self, seconds: float) -> bool:
        return not self._socket.poll(seconds * 1000)


def hello(settings: RunConfig, **changes: Any) -> bytes:
    fields = {
        "type": "hello",
        "protocol": PROTOCOL_VERSION,
        "schema": SCHEMA_VERSION,
        "contract": settings.contract_hash(),
        "role": "actor",
        "name": "raw",
        "pid": 1,
        "host": "h",
        "rank": 0,
        "world": 1,
        "step": 0,
        "group": "g",
        **changes,
    }
    return pack_header({k: v for k, v in fields.items() if v is not None})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for a state that the server reaches by itself."""
    deadline, event = time.monotonic() + WAIT_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        event.wait(0.01)
