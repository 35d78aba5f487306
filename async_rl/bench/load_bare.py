"""The load of :mod:`async_rl.bench.load` on a bare ROUTER: a message a group, as many in flight, and no more."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from async_rl.bench.load import SILENCE_S
from async_rl.bench.load_messages import Template
from async_rl.errors import DeadlineError
from async_rl.wire import Frame, encode_groups, send_frames

_ALIVE_S = 0.1


class BareLoad:
    """DEALERs that send to a ROUTER which only acknowledges. Use as a context manager.

    Args:
        address: of the ROUTER.
        num_actors: connections.
        size: trajectories of a group.
        nbytes: of a trajectory.
        stock: unacknowledged messages of a connection.
        beside: called ten times a second meanwhile.
    """

    def __init__(
        self, address: str, *, num_actors: int, size: int, nbytes: int, stock: int, beside: Callable[[], None]
    ) -> None:
        self._context = zmq.Context()
        self._template = Template(size, nbytes)
        self._stock = stock
        self._beside = beside
        self._sockets: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        for _ in range(num_actors):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.SNDHWM, 0)  # as those of our clients
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
        alive_at = began
        for socket in self._sockets:
            for i in range(self._stock):
                send_frames(socket, self._message(i))
        left = self._stock * len(self._sockets)
        while left:
            ready = self._poller.poll(int(SILENCE_S * 1000))
            if not ready:
                raise DeadlineError(f"the bare socket has acknowledged nothing for {SILENCE_S:g} s")
            now = time.monotonic()
            goes_on = now < began + seconds
            for socket, _ in ready:
                num_heard = _count_waiting(socket)
                count += num_heard
                for i in range(num_heard if goes_on else 0):
                    send_frames(socket, self._message(count + i))
                left -= 0 if goes_on else num_heard
            if now >= alive_at:
                alive_at = now + _ALIVE_S
                self._beside()
        return count / (time.monotonic() - began), count

    def _message(self, ordinal: int) -> list[Frame]:
        return encode_groups("submit", [self._template.group([ordinal, 0, 0, 0, 0], "a")], seq=ordinal)


def _count_waiting(socket: zmq.Socket[bytes]) -> int:
    """Take all messages that wait in a socket; how many they were."""
    for count in range(1 << 31):
        try:
            socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return count
    return 0
