"""Load on a buffer server: many mock actors and a mock learner, on real sockets, in one thread of this process.

    tickets ─► MockActor.stock ─► submit (one group a message) ─► ack: its latency is known      version ─► live
    MockLearner: next(s) ─► shard ─► trained(s, manifest) ─► next(s + 1)

The sockets are bare DEALERs: what a :class:`~async_rl.client.Client` does beside would be the limit, not the server.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import zmq

from async_rl.bench.served import VOCABULARY, ServerProcess
from async_rl.data import Group, make_group, token_trajectory
from async_rl.errors import DeadlineError, HandshakeError
from async_rl.protocol import BEATS_PER_PERIOD, PROTOCOL_VERSION
from async_rl.wire import SCHEMA_VERSION, Frame, encode_groups, pack_header, send_frames, unpack_header

BYTES_PER_TOKEN = 13
"""tokens int32, loss_mask uint8, logprobs float32, versions int32."""
SILENCE_S = 30.0
"""A server that says nothing for so long does not answer any more."""


def group_of(ordinal: int, attempt: int, task_index: int, version: int, *, size: int, nbytes: int) -> Group:
    """A group of ``size`` trajectories of about ``nbytes`` bytes each, sampled by ``version``; a quarter is prompt."""
    length = max(2, nbytes // BYTES_PER_TOKEN)
    num_prompt = length // 4 or 1
    noise = np.random.default_rng(ordinal)
    trajectories = [
        token_trajectory(
            prompt=noise.integers(0, VOCABULARY, num_prompt).tolist(),
            completion=noise.integers(0, VOCABULARY, length - num_prompt),
            logprobs=-noise.random(length - num_prompt),
            versions=np.full(length - num_prompt, version),
            reward=float(i % 2),
        )
        for i in range(size)
    ]
    return make_group(ordinal=ordinal, attempt=attempt, task_index=task_index, trajectories=trajectories)


@dataclass(slots=True)
class Template:
    """Messages that differ from one group to the next in what names the group only."""

    size: int
    nbytes: int
    frames: dict[int, tuple[dict[str, Any], list[Frame]]] = field(default_factory=dict)
    """Header and frames by version."""

    def message(self, ticket: list[Any], name: str, seq: int) -> list[Frame]:
        """The ``submit`` that answers a ticket."""
        ordinal, attempt, task_index, _, version, *_ = ticket
        if version not in self.frames:
            group = group_of(0, 0, 0, version, size=self.size, nbytes=self.nbytes)
            head, *rest = encode_groups("submit", [group])
            self.frames[version] = (unpack_header(head), [bytes(frame) for frame in rest])
        header, frames = self.frames[version]
        (described,) = header["groups"]
        described["ordinal"], described["attempt"], described["task_index"] = ordinal, attempt, task_index
        described["meta"] = {"actor": name, "seconds": 0.25}
        header["seq"] = seq
        return [msgpack.packb(header), *frames]


class Line:
    """One bare connection that beats; everything that arrives goes to ``hear``."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], server: ServerProcess, name: str, **hello: Any) -> None:
        self.name = name
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(server.address)
        self.fileno = int(self.socket.getsockopt(zmq.FD))
        self._seq = 0
        self._beat_s = 1.0
        self.next_beat = 0.0
        fields = {"protocol": PROTOCOL_VERSION, "schema": SCHEMA_VERSION, "contract": server.config.contract_hash()}
        self.say("hello", **fields, name=name, pid=os.getpid(), host="bench", rank=0, world=1, **hello)

    def next_seq(self) -> int:
        """Number of the next message."""
        self._seq += 1
        return self._seq

    def say(self, kind: str, **fields: Any) -> None:
        """Send a message without arrays."""
        self.socket.send(pack_header({"type": kind, "schema": SCHEMA_VERSION, "seq": self.next_seq(), **fields}))

    def beat(self, now: float) -> None:
        """Beat, when it is time."""
        if now >= self.next_beat:
            self.next_beat = now + self._beat_s
            self.say("beat", cpu_s=0.0, rss_bytes=0.0)

    def receive(self) -> Iterator[dict[str, Any]]:
        """The headers of all that has arrived.

        Raises:
            HandshakeError: the server refuses us.
        """
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            header = msgpack.unpackb(frames[0].buffer)
            if header["type"] == "welcome":
                self._beat_s = header["heartbeat_s"] / BEATS_PER_PERIOD
            if header["type"] in ("refused", "stop", "cancel"):
                raise HandshakeError(f"{self.name}: {header}")
            yield header


class MockActor(Line):
    """Answers tickets when it is told to."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        server: ServerProcess,
        name: str,
        template: Template,
        most: int,
    ) -> None:
        self.stock: deque[list[Any]] = deque()
        """Tickets that are not answered yet."""
        self.sent: dict[tuple[int, int], float] = {}
        """When each answer was due that is not acknowledged yet."""
        self._template, self._most, self._offered, self._received = template, most, 0, 0
        self._server = server
        super().__init__(context, server, name, role="actor")

    def turn(self, heard: Callable[[float], None]) -> None:
        """Take what has arrived; ``heard`` is told when each acknowledged answer was due."""
        for header in self.receive():
            kind = header["type"]
            if kind == "ack":
                for ordinal, attempt, outcome, reason in header["results"]:
                    if outcome != "accepted":
                        raise HandshakeError(f"{self.name}: ordinal {ordinal} is {outcome}: {reason}")
                    heard(self.sent.pop((ordinal, attempt)))
            elif kind == "tickets":
                self.stock.extend(header["tickets"])
                self._received += len(header["tickets"])
                self._offered -= len(header["tickets"])
            elif kind in ("welcome", "version") and header["manifest"] is not None:
                version = header["manifest"]["version"]
                checksum = header["manifest"]["checksum"]
                self.say("live", version=version, checksum=checksum, transfer_s=0.0, commit_s=0.0)
        self.offer()

    def offer(self) -> None:
        """Tell how many tickets it can take, if that has grown by much."""
        room = self._most - len(self.stock)
        if room > self._offered + self._most // 4:
            self._offered = room
            self.say("credit", count=room, received=self._received)

    def submit(self, due: float) -> bool:
        """Answer a ticket; False if it has none."""
        if not self.stock:
            return False
        ticket = self.stock.popleft()
        self.sent[ticket[0], ticket[1]] = due
        send_frames(self.socket, self._template.message(ticket, self.name, self.next_seq()))
        return True


class MockLearner(Line):
    """Asks for a step, calls it trained at once, and so on."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], server: ServerProcess) -> None:
        self.step = 0
        self._server = server
        super().__init__(context, server, "learner0", role="learner", group="g", step=0)

    def turn(self) -> None:
        """Take what has arrived."""
        for header in self.receive():
            if header["type"] == "welcome":
                self._publish(-1, 0)
            elif header["type"] == "shard":
                self._publish(header["step"], header["step"] + 1)
            elif header["type"] == "trained":
                self.step = header["step"] + 1
                self.say("next", step=self.step)

    def _publish(self, step: int, version: int) -> None:
        self.say("trained", step=step, manifest=self._server.manifest(version).to_wire(), stats={})


class Load:
    """Mock actors and a learner on one server. Use as a context manager.

    Args:
        server: what is loaded.
        num_actors: connections of actors.
        nbytes: of a trajectory.
        stock: tickets that an actor holds at most.
    """

    def __init__(self, server: ServerProcess, *, num_actors: int, nbytes: int, stock: int) -> None:
        self._context = zmq.Context()
        template = Template(server.config.group_size, nbytes)
        self.learner = MockLearner(self._context, server)
        self.actors = [MockActor(self._context, server, f"a{i}", template, stock) for i in range(num_actors)]
        self._lines: list[Line] = [self.learner, *self.actors]
        self._poller = zmq.Poller()
        for line in self._lines:
            self._poller.register(line.socket, zmq.POLLIN)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(0)

    def closed_loop(self, seconds: float) -> tuple[float, int]:
        """Each ticket is answered as soon as it comes; returns groups acknowledged per second, and in all."""
        count = 0
        last = began = time.monotonic()

        def heard(due: float) -> None:
            nonlocal count, last
            count += 1
            last = now

        now = began
        while now < began + seconds:
            self._wait(now, last, 50)
            now = time.monotonic()
            self.learner.turn()
            for actor in self.actors:
                actor.turn(heard)
                while actor.submit(now):
                    pass
                actor.offer()
        return count / (last - began), count

    def open_loop(self, rate: float, seconds: float, seed: int) -> list[float]:
        """Answers fall due at random moments (Poisson), whatever the server does; returns seconds until each ack.

        What cannot be sent when it is due, because no ticket is there or this thread is late, counts from when it was
        due.
        """
        noise = np.random.default_rng(seed)
        dues = np.cumsum(noise.exponential(1 / rate, int(rate * seconds))).tolist()
        gc.collect()
        gc.freeze()  # or this thread looks through all that is imported now and then, and is late
        began = last = time.monotonic()
        latencies: list[float] = []

        def heard(due: float) -> None:
            nonlocal last
            last = time.monotonic()
            latencies.append(last - due)

        sent = turn = 0
        while len(latencies) < len(dues):
            now = time.monotonic()
            late = True
            while late and sent < len(dues) and began + dues[sent] <= now:
                for _ in self.actors:
                    turn = (turn + 1) % len(self.actors)
                    late = self.actors[turn].submit(began + dues[sent])
                    if late:
                        sent += 1
                        break
            left_s = began + dues[sent] - now if sent < len(dues) and late else 0.05
            self._wait(now, last, max(0, left_s * 1000))
            self.learner.turn()
            for actor in self.actors:
                actor.turn(heard)
        return latencies

    def _wait(self, now: float, last: float, most_ms: float) -> None:
        """Until something arrives.

        Raises:
            DeadlineError: nothing was acknowledged for :data:`SILENCE_S`.
        """
        if now - last > SILENCE_S:
            raise DeadlineError(f"the server has acknowledged nothing for {SILENCE_S:g} s")
        for line in self._lines:
            line.beat(now)
        self._poller.poll(math.ceil(most_ms))


class BareLoad:
    """The same messages, as many in flight, to a ROUTER that only acknowledges them. Use as a context manager.

    Args:
        address: of the ROUTER.
        num_actors: connections.
        size: trajectories of a group.
        nbytes: of a trajectory.
        stock: unacknowledged messages of a connection.
    """

    def __init__(self, address: str, *, num_actors: int, size: int, nbytes: int, stock: int) -> None:
        self._context = zmq.Context()
        self._template = Template(size, nbytes)
        self._stock = stock
        self._sockets: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        for _ in range(num_actors):
            socket = self._context.socket(zmq.DEALER)
            socket.connect(address)
            self._poller.register(socket, zmq.POLLIN)
            self._sockets.append(socket)

    def __enter__(self) -> BareLoad:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(0)

    def closed_loop(self, seconds: float) -> tuple[float, int]:
        """Each acknowledgement is answered by a message; returns messages per second, and in all."""
        began, count = time.monotonic(), 0
        for socket in self._sockets:
            for i in range(self._stock):
                send_frames(socket, self._message(i))
        left = self._stock * len(self._sockets)
        while left:
            ready = self._poller.poll(int(SILENCE_S * 1000))
            if not ready:
                raise DeadlineError(f"the bare socket has acknowledged nothing for {SILENCE_S:g} s")
            goes_on = time.monotonic() < began + seconds
            for socket, _ in ready:
                num_heard = _count_waiting(socket)
                count += num_heard
                for i in range(num_heard if goes_on else 0):
                    send_frames(socket, self._message(count + i))
                left -= 0 if goes_on else num_heard
        return count / (time.monotonic() - began), count

    def _message(self, ordinal: int) -> list[Frame]:
        return self._template.message([ordinal, 0, 0, 0, 0], "a", ordinal)


def _count_waiting(socket: zmq.Socket[bytes]) -> int:
    """Take all messages that wait in a socket; how many they were."""
    for count in range(1 << 31):
        try:
            socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return count
    return 0
