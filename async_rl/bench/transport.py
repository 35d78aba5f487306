"""``bench transport``: bytes a second from an actor to the buffer server, and from there to a learner.

    Client of an actor (here)   ──submit──► the real server, journal on ──ack──►     beside   DEALER ─► ROUTER ─► ack
    Client of a learner (here)  ◄──shard─── the same server ◄──next──                beside   DEALER ◄─ ROUTER

Each trajectory is a group, and so a message, of its own; ours counts when it is judged, on record and acknowledged, and
the learner's shard when its groups are decoded. The bare sockets carry the same frames in the same sizes, out of
memory and into memory without a copy, and do nothing else.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgpack
import zmq

from async_rl.bench.figures import REPEATS, Figure, paired, show
from async_rl.bench.load import SILENCE_S, group_of
from async_rl.bench.served import GET, EchoProcess, ServerProcess
from async_rl.client import Client
from async_rl.data import Group
from async_rl.errors import DeadlineError, HandshakeError
from async_rl.protocol import Ticket
from async_rl.wire import Frame, decode_groups, encode_groups, receive_frames, send_frames

BAR = 0.8
_WARMUP = 2
"""The first pairs touch memory and disk for the first time."""


def transport(*, nbytes: int, count: int, repeats: int = REPEATS, out: Path | None = None) -> None:
    """Measure, print, and write JSON.

    Args:
        nbytes: of a trajectory.
        count: trajectories of each measurement, and of a learner step.
        repeats: measurements of each figure.
        out: the JSON file.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="async-rl-bench-")))
        server = ServerProcess(
            folder / "s",
            groups_per_step=count,
            group_size=1,
            max_staleness=repeats + _WARMUP,
            max_bytes=4 * count * nbytes,
        )
        ours = stack.enter_context(_Ours(stack.enter_context(server), count, nbytes))
        bare = stack.enter_context(_Bare(stack.enter_context(EchoProcess(folder / "e")), count, nbytes))
        there = paired(ours.submit, bare.submit, repeats, _WARMUP)
        back = (tuple(ours.delivered[_WARMUP:]), tuple(bare.delivered[_WARMUP:]))
    show(
        f"transport, {count} trajectories of {nbytes} bytes",
        [
            Figure("actor to server, acknowledged", "GB/s", there[0], "bare pyzmq", there[1], bar=BAR),
            Figure("server to learner, decoded", "GB/s", back[0], "bare pyzmq", back[1]),
        ],
        out,
        nbytes=nbytes,
        count=count,
    )


class _Ours:
    """An actor and a learner of the real server."""

    def __init__(self, server: ServerProcess, count: int, nbytes: int) -> None:
        self._server, self._count = server, count
        self._group = group_of(0, 0, 0, 0, size=1, nbytes=nbytes)
        self._step = 0
        self.delivered: list[float] = []
        """GB/s of the learner's shards."""
        contract = server.config.contract_hash()
        self._learner = Client(server.address, "learner", "learner0", contract, group="g")
        self._actor = Client(server.address, "actor", "actor0", contract)

    def __enter__(self) -> _Ours:
        self._learner.connect(SILENCE_S)
        self._trained(-1, 0)
        manifest = self._actor.connect(SILENCE_S)["manifest"]
        checksum = manifest["checksum"]
        self._actor.send("live", version=0, checksum=checksum, transfer_s=0.0, commit_s=0.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._actor.close()
        self._learner.close()

    def submit(self) -> float:
        """Answer ``count`` tickets; GB/s until the last is acknowledged. Then a learner step takes them."""
        groups = [self._answer(ticket) for ticket in self._tickets()]
        began = time.perf_counter()
        for group in groups:
            self._actor.send_groups([group])
        left = self._count
        while left:
            left -= sum(_accepted(results) for results in self._hear("ack", "results"))
        rate = _gigabytes(groups) / (time.perf_counter() - began)
        self._take(groups)
        return rate

    def _take(self, groups: list[Group]) -> None:
        began = time.perf_counter()
        header, frames = self._learner.request("next", "shard", SILENCE_S, step=self._step)
        decoded = decode_groups(header, frames)
        self.delivered.append(_gigabytes(decoded) / (time.perf_counter() - began))
        del header, frames, decoded
        self._trained(self._step, self._step + 1)
        self._step += 1

    def _trained(self, step: int, version: int) -> None:
        manifest = self._server.manifest(version).to_wire()
        self._learner.request("trained", "trained", SILENCE_S, step=step, manifest=manifest, stats={})

    def _tickets(self) -> list[Ticket]:
        self._actor.send("credit", count=self._count)
        tickets: list[Ticket] = []
        while len(tickets) < self._count:
            for fields in self._hear("tickets", "tickets"):
                tickets += [Ticket.from_wire(ticket) for ticket in fields]
        return tickets

    def _hear(self, kind: str, field: str) -> list[list[list[object]]]:
        """What messages of a type bring; others are passed over.

        Raises:
            DeadlineError: nothing arrived for :data:`SILENCE_S`.
        """
        messages = self._actor.receive(SILENCE_S)
        if not messages:
            raise DeadlineError(f"no {kind} from the server for {SILENCE_S:g} s")
        return [header[field] for header, _ in messages if header["type"] == kind]

    def _answer(self, ticket: Ticket) -> Group:
        return replace(self._group, ordinal=ticket.ordinal, attempt=ticket.attempt, task_index=ticket.task_index)


class _Bare:
    """A DEALER that sends the same frames to a bare ROUTER, and gets them from there."""

    def __init__(self, echo: EchoProcess, count: int, nbytes: int) -> None:
        self._count = count
        self._group = group_of(0, 0, 0, 0, size=1, nbytes=nbytes)
        self.delivered: list[float] = []
        """GB/s of what the ROUTER sends."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(echo.address)

    def __enter__(self) -> _Bare:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(0)

    def submit(self) -> float:
        """Send ``count`` messages; GB/s until the last is acknowledged. Then as many come back in one message."""
        frames = encode_groups("submit", [self._group])
        total = _gigabytes([self._group] * self._count)
        began = time.perf_counter()
        for _ in range(self._count):
            send_frames(self._socket, frames)
        for _ in range(self._count):
            self._receive()
        rate = total / (time.perf_counter() - began)
        sizes = [len(frames[0]) * self._count, *[len(frame) for frame in frames[1:]] * self._count]
        began = time.perf_counter()
        send_frames(self._socket, [GET, msgpack.packb(sizes)])
        self._receive()
        self.delivered.append(total / (time.perf_counter() - began))
        return rate

    def _receive(self) -> list[Frame]:
        if not self._socket.poll(int(SILENCE_S * 1000)):
            raise DeadlineError(f"nothing from the bare socket for {SILENCE_S:g} s")
        return receive_frames(self._socket)


def _accepted(results: list[list[object]]) -> int:
    """How many rows there are, if all are well."""
    for ordinal, _, outcome, reason in results:
        if outcome != "accepted":
            raise HandshakeError(f"ordinal {ordinal} is {outcome}: {reason}")
    return len(results)


def _gigabytes(groups: list[Group]) -> float:
    return sum(group.nbytes for group in groups) / 1e9
