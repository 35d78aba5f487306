"""Which address of this host leads to another one, as the kernel would route it; nothing is sent."""

from __future__ import annotations

import socket
from typing import Any

import zmq

from async_rl.errors import ConfigError


def parted(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, with ``tcp://`` before it or without; an IPv6 address may stand in brackets."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def joined(host: str, port: int) -> str:
    """``HOST:PORT``, the reverse of :func:`parted`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def speak_its_family(connection: zmq.Socket[Any], address: str) -> None:
    """Before a ZeroMQ socket is bound or connected: IPv6 must be switched on, and names stand for IPv4 without."""
    if "[" in address:
        connection.set(zmq.IPV6, 1)


def route_to(address: str) -> tuple[str, str]:
    """Our address and theirs, as numbers.

    Args:
        address: ``HOST:PORT``; a name stands for an IPv4 address.

    Raises:
        ConfigError: the name is unknown, or there is no way to it.
    """
    host, port = parted(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise ConfigError(f"{joined(host, port)} cannot be reached from here: {error.strerror}") from None
        return str(probe.getsockname()[0]), str(probe.getpeername()[0])
