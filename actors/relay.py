"""An actor host sends the weights on: a chunk server of its own, on what its receiver has, or is just receiving.

    learner, or a parent ──chunks──► receiver ──► Filling ──► Relay ──chunks──► up to weights.relay other hosts

Who pulls from whom is the buffer server's decision: see :mod:`async_rl.buffer.relays`.
"""

from __future__ import annotations

from collections.abc import Collection

from async_rl.config import RunConfig
from async_rl.curve import ClientKeys, check_open
from async_rl.errors import ConfigError, WeightsError
from async_rl.route import joined, route_to
from async_rl.weights.filling import Filling
from async_rl.weights.server import WeightServer


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
    """The relay of this process: on loopback, or on the address that faces the server. ``None``: it may not listen.

    Args:
        config: of the run, with ``weights.relay``.
        server: address of the buffer server.
        keys: of this client.
    """
    try:
        ours, _ = route_to(server)
        bind = f"tcp://{joined(ours, config.weights.relay_port)}"  # 0: any free port
        what = f"weights.relay: this process would listen at {bind}"
        check_open(bind, config.buffer.keys, insecure=config.buffer.insecure, what=what)
        return Relay(bind, keys)
    except (ConfigError, WeightsError) as error:
        shared = " (one process of a host has weights.relay_port, and sends on)" if config.weights.relay_port else ""
        print(f"weights: this process sends nothing on to other hosts: {error}{shared}", flush=True)
        return None
