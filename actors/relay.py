"""An actor host sends the weights on: a chunk server of its own, on what its receiver has, or is just receiving.

    learner, or a parent ──chunks──► receiver ──► Filling ──► Relay ──chunks──► up to weights.relay other hosts

Who pulls from whom is the buffer server's decision: see :mod:`async_rl.buffer.relays`.
"""

from __future__ import annotations

import socket
from collections.abc import Collection

from async_rl.config import RunConfig
from async_rl.curve import ClientKeys, check_open
from async_rl.errors import ConfigError, WeightsError
from async_rl.weights.filling import Filling
from async_rl.weights.server import WeightServer

_ANY_PORT = 1


class Relay:
    """Serves versions to other hosts, in a thread of its own.

    Args:
        bind: such as ``tcp://10.0.0.2:*``; this host's address, by which others reach it.
        keys: of this client; only those who have the same are let in. ``None``: everyone.

    Raises:
        WeightsError: the address cannot be bound.
    """

    def __init__(self, bind: str, keys: ClientKeys | None) -> None:
        self._server = WeightServer(bind, keys.to_serve() if keys is not None else None, patient=True)
        try:
            self._server.start()
        except WeightsError:
            self._server.close()
            raise
        self.key = keys.public.decode() if keys is not None else ""
        """Public key: those who have the same may pull from here."""
        self.counts = self._server.counts

    @property
    def address(self) -> str:
        """Where others pull from."""
        return self._server.address

    def offer(self, filling: Filling) -> None:
        """Serve this version from now on, as it is being filled."""
        self._server.share(filling)

    def news(self) -> None:
        """A chunk has come."""
        self._server.news()

    def keep(self, orders: Collection[tuple[int, int]]) -> None:
        """Serve no other versions any more."""
        self._server.keep(orders)

    def close(self) -> None:
        """End the thread."""
        self._server.close()


def open_relay(config: RunConfig, server: str, keys: ClientKeys | None) -> Relay | None:
    """The relay of this process, if it is to have one: on loopback, or on the address that faces the server.

    Args:
        config: of the run.
        server: address of the buffer server.
        keys: of this client.
    """
    if not config.weights.relay or config.weights.path == "shm":
        return None
    try:
        bind = f"tcp://{_bracketed(facing(server))}:*"
        check_open(bind, config.buffer.keys, insecure=config.buffer.insecure)
        return Relay(bind, keys)
    except (ConfigError, WeightsError, OSError) as error:
        print(f"weights: this host sends nothing on, others pull from the learner: {error}", flush=True)
        return None


def facing(server: str) -> str:
    """The address of this host from which packets to a server leave; nothing is sent.

    Args:
        server: ``tcp://HOST:PORT``.

    Raises:
        OSError: there is no way to it.
    """
    host = server.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))  # names a route; the resolver of names has deadlines of its own
        return str(probe.getsockname()[0])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
