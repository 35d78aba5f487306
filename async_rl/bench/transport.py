"""``bench transport``: bytes a second from an actor to the buffer server, and from there to a learner.

    Client of an actor (here)   ──submit──► the real server ──ack──►     beside     DEALER ──► bare ROUTER ──► ack
    Client of a learner (here)  ◄──shard─── the same server ◄──next──    beside     DEALER ◄── bare ROUTER ◄── get

Each trajectory is a group, and so a message, of its own. Ours counts when it is judged, in the journal and
acknowledged, and the learner's shard when its groups are decoded. The baseline goes the same way with the same bytes:
two processes, two DEALERs with an I/O thread each on this side, one ROUTER on the other, the same frames in each
message, sent and received without a copy; the ROUTER acknowledges each message, holds all frames, as a buffer must, and
sends them in one message to the DEALER that asks for them. It looks at nothing and writes nothing down. It is measured
as pyzmq is, and once more with the allocator's settings of our server (:mod:`async_rl.buffer.memory`), which are worth
as much to it: what is left between that and ours is the journal and the look at each token.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import zmq

from async_rl.bench.figures import REPEATS, Figure, paired, show
from async_rl.bench.load import SILENCE_S
from async_rl.bench.load_messages import group_of
from async_rl.bench.served import GET, EchoProcess, ServerProcess
from async_rl.client import Client
from async_rl.data import Group
from async_rl.errors import ConfigError, DeadlineError, HandshakeError, WireError
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

    Raises:
        ConfigError: this machine has not the memory for it.
    """
    if 4 * count * nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise ConfigError(f"{count} trajectories of {nbytes} bytes, held by both sides, do not fit into memory")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="async-rl-bench-")))
        server = ServerProcess(
            folder / "s",
            groups_per_step=count,
            group_size=1,
            max_staleness=2 * (repeats + _WARMUP),
            max_bytes=max(1 << 20, 4 * count * nbytes),
        )
        ours = stack.enter_context(_Ours(stack.enter_context(server), count, nbytes))
        figures: list[Figure] = []
        for name, reuses in (("bare pyzmq", False), ("with our allocator's settings", True)):
            echo = stack.enter_context(EchoProcess(folder / name, keeps=True, reuses=reuses))
            bare = stack.enter_context(_Bare(echo, count, nbytes))
            figures += _measure(ours, bare, name, repeats, None if reuses else BAR)
    show(f"transport, {count} trajectories of {nbytes} bytes", figures, out, nbytes=nbytes, count=count)


def _measure(ours: _Ours, bare: _Bare, name: str, repeats: int, bar: float | None) -> list[Figure]:
    ours.delivered.clear()
    there = paired(ours.submit, bare.submit, repeats, _WARMUP)
    back = (tuple(ours.delivered[_WARMUP:]), tuple(bare.delivered[_WARMUP:]))
    return [
        Figure("actor to server, acknowledged", "GB/s", there[0], name, there[1], bar=bar),
        Figure("server to learner, decoded", "GB/s", back[0], name, back[1]),
    ]


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
    """DEALERs that send the same frames to a bare ROUTER, and get them from there."""

    def __init__(self, echo: EchoProcess, count: int, nbytes: int) -> None:
        self._count = count
        self._group = group_of(0, 0, 0, 0, size=1, nbytes=nbytes)
        self.delivered: list[float] = []
        """GB/s of what the ROUTER sends."""
        self._contexts = [zmq.Context(), zmq.Context()]
        self._actor, self._learner = (_dealer(context, echo.address) for context in self._contexts)

    def __enter__(self) -> _Bare:
        return self

    def __exit__(self, *_: object) -> None:
        for context in self._contexts:
            context.destroy(0)

    def submit(self) -> float:
        """Send ``count`` messages; GB/s until the last is acknowledged. Then all come back in one message."""
        frames = encode_groups("submit", [self._group])
        total = _gigabytes([self._group] * self._count)
        began = time.perf_counter()
        for _ in range(self._count):
            send_frames(self._actor, frames)
        for _ in range(self._count):
            _heard(self._actor)
        rate = total / (time.perf_counter() - began)
        began = time.perf_counter()
        send_frames(self._learner, [GET])
        received = _heard(self._learner)
        self.delivered.append(total / (time.perf_counter() - began))
        if sum(map(len, received)) != self._count * sum(map(len, frames)):
            raise WireError("frame_count", "the bare socket lost some of what it was sent")
        return rate


def _dealer(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(address)
    return socket


def _heard(socket: zmq.Socket[bytes]) -> list[Frame]:
    """The frames of the next message."""
    if not socket.poll(int(SILENCE_S * 1000)):
        raise DeadlineError(f"nothing from the bare socket for {SILENCE_S:g} s")
    return receive_frames(socket)


def _accepted(results: list[list[object]]) -> int:
    """How many rows there are, if all are well."""
    for ordinal, _, outcome, reason in results:
        if outcome != "accepted":
            raise HandshakeError(f"ordinal {ordinal} is {outcome}: {reason}")
    return len(results)


def _gigabytes(groups: list[Group]) -> float:
    return sum(group.nbytes for group in groups) / 1e9
