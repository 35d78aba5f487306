"""Clients on bare sockets: what a :class:`~async_rl.client.Client` does beside would be the limit, not the server.

tickets ─► MockActor.stock ─► submit (one group a message) ─► ack: its latency is known      version ─► live
MockLearner: next(s) ─► shard ─► trained(s, manifest) ─► next(s + 1)
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import zmq

from async_rl.bench.load_messages import Template
from async_rl.bench.served import ServerProcess
from async_rl.data import Group
from async_rl.errors import HandshakeError
from async_rl.outbox import MOST_TOGETHER
from async_rl.protocol import BEATS_PER_PERIOD, PROTOCOL_VERSION
from async_rl.wire import SCHEMA_VERSION, encode_groups, pack_header, send_frames


class Line:
    """One bare connection that beats."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], server: ServerProcess, name: str, **hello: Any) -> None:
        self.name = name
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(server.address)
        self._seq = 0
        self._beat_s = 1.0
        self._next_beat = 0.0
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
        if now >= self._next_beat:
            self._next_beat = now + self._beat_s
            self.say("beat", cpu_s=0.0, rss_bytes=0.0)

    def receive(self) -> Iterator[dict[str, Any]]:
        """The headers of all that has arrived.

        Raises:
            HandshakeError: the server refuses us.
        """
        while True:
            try:
                head, *_ = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            header = msgpack.unpackb(head)
            if header["type"] == "welcome":
                self._beat_s = header["heartbeat_s"] / BEATS_PER_PERIOD
            if header["type"] in ("refused", "stop", "cancel"):
                raise HandshakeError(f"{self.name}: {header}")
            yield header


class MockActor(Line):
    """Answers tickets when it is told to.

    Args:
        context: of the socket.
        server: the server.
        name: its own.
        template: of its messages.
        most: tickets that it holds at most.
    """

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
        self._answers: list[Group] = []
        self._template, self._most, self._offered, self._received = template, most, 0, 0
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
        """Answer a ticket, at the next :meth:`flush`; False if it has none."""
        if not self.stock:
            return False
        ticket = self.stock.popleft()
        self.sent[ticket[0], ticket[1]] = due
        self._answers.append(self._template.group(ticket, self.name))
        return True

    def flush(self) -> None:
        """Send all answers, small ones in one message, as a client does with those that wait together."""
        most = max(1, MOST_TOGETHER // self._answers[0].nbytes) if self._answers else 1
        for at in range(0, len(self._answers), most):
            send_frames(self.socket, encode_groups("submit", self._answers[at : at + most], seq=self.next_seq()))
        self._answers.clear()


class MockLearner(Line):
    """Asks for a step, calls it trained at once, and so on."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], server: ServerProcess) -> None:
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
                self.say("next", step=header["step"] + 1)

    def _publish(self, step: int, version: int) -> None:
        self.say("trained", step=step, manifest=self._server.manifest(version).to_wire(), stats={})
