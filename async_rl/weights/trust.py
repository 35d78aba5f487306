"""Where a broadcast of weights may go: gloo, NCCL and their store neither encrypt nor know each other. Pure."""

from __future__ import annotations

from async_rl.config import RunConfig
from async_rl.curve import is_loopback
from async_rl.errors import ConfigError

_EVERYWHERE = ("*", "0.0.0.0", "::")


def sending_host(config: RunConfig) -> str:
    """Address of the learner's host on which receivers meet: the one on which its server listens.

    Raises:
        ConfigError: that names no host, or others can reach it and nobody vouches for the network.
    """
    host = _host(config.buffer.bind)
    if host in _EVERYWHERE:
        raise ConfigError(
            f"weights.path = 'broadcast' with buffer.bind = {config.buffer.bind!r}: the engines meet at one address of "
            "this host; write it in buffer.bind as the actor hosts reach it"
        )
    _check(host, config, "this host")
    return "127.0.0.1" if host == "localhost" else host


def check_receiver(config: RunConfig, server: str) -> None:
    """Check that this host may take part.

    Args:
        config: of the run, as this host has it.
        server: address of the buffer server, ``tcp://HOST:PORT``.

    Raises:
        ConfigError: the learner is on another host, and nobody here vouches for the network.
    """
    _check(_host(server), config, "the learner's host")


def _check(host: str, config: RunConfig, whose: str) -> None:
    if not (is_loopback(host) or config.weights.trusted_network):
        raise ConfigError(
            f"weights.path = 'broadcast' over {host}, the address of {whose}: weights go through gloo or NCCL, which "
            "neither encrypt nor know each other; if nobody else can reach that network, say so with --trusted-network "
            "(weights.trusted_network) on the learner's host and on every actor host"
        )


def _host(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
