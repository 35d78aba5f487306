"""A server of the test's own for a real client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from server_helpers import WAIT_S, manifest

from async_rl.client import Client
from async_rl.wire import Header, encode_groups, pack_header, unpack_header


class FakeServer:
    """A ROUTER in the test's own thread, which answers only when told."""

    def __init__(self, heartbeat_s: float, address: str = "tcp://127.0.0.1:*") -> None:
        self.heartbeat_s = heartbeat_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.identity = b""

    def hear(self, *kinds: str, alive: bool = False) -> Header:
        """The next message of one of these types; beats on the way are answered if the server is to be alive."""
        while self._socket.poll(WAIT_S * 1000):
            self.identity, head, *_ = self._socket.recv_multipart()
            header = unpack_header(head)
            if header["type"] in kinds:
                return header
            if header["type"] == "beat" and alive:
                self.say("beat")
        raise AssertionError(f"no {kinds}")

    def say(self, kind: str, **fields) -> None:
        self._socket.send_multipart([self.identity, pack_header({"type": kind, **fields})])

    def lease(self, *groups) -> None:
        self._socket.send_multipart([self.identity, *encode_groups("lease", groups, lease_s=9.0)])

    def welcome(self, run_id: str = "r", weights: str = "tcp://127.0.0.1:1", epoch: int = 0) -> None:
        self.hear("hello")
        self.say(
            "welcome",
            run_id=run_id,
            heartbeat_s=self.heartbeat_s,
            next_step=0,
            epoch=epoch,
            manifest=manifest(4).to_wire(),
            weights_address=weights,
        )

    def close(self) -> None:
        self._context.destroy(0)


def receive_for_ever(client: Client) -> None:
    while True:
        client.receive(WAIT_S)


@contextmanager
def connected(heartbeat_s: float = 30.0, **welcome: str) -> Iterator[tuple[FakeServer, Client]]:
    server = FakeServer(heartbeat_s)
    try:
        with Client(server.address, "actor", "a", "c") as client:
            thread = threading.Thread(target=server.welcome, kwargs=welcome)
            thread.start()
            client.connect(WAIT_S)
            thread.join()
            yield server, client
    finally:
        server.close()
