"""The network interfaces of this host: which one has an address, what listens there alone, who is told to use it."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from pathlib import Path

from async_rl.errors import ConfigError

_GET_ADDRESSES = 0x8912
"""SIOCGIFCONF: every IPv4 address, also the second one of an interface."""
_ROW, _MOST_ROWS = 40, 256
"""Bytes of a struct ifreq on 64 bits: the name, or a label, in 16, then a struct sockaddr_in."""


def listen(host: str) -> socket.socket:
    """A socket on a free port of this address alone; torch's own would be open on all interfaces."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    try:
        listening.bind((host, 0))
        listening.listen(1024)
    except OSError:
        listening.close()
        raise
    return listening


def interface_of(address: str) -> str:
    """Name of the network interface that has this address.

    Raises:
        ConfigError: none has.
    """
    for name, found in _addresses():
        if found == address:
            return name
    raise ConfigError(
        f"no network interface has the address {address}: name the one that leads to the other learner hosts in "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )


def use_interface(name: str) -> None:
    """Have gloo and NCCL talk over this interface, unless the user has chosen another."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without the sign: all whose names begin so


def _addresses() -> list[tuple[str, str]]:
    """Interfaces with their addresses."""
    table = array.array("B", bytes(_ROW * _MOST_ROWS))
    place, size = table.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        filled, _ = struct.unpack("iL", fcntl.ioctl(probe, _GET_ADDRESSES, struct.pack("iL", size, place)))
    rows = (table[at : at + _ROW].tobytes() for at in range(0, filled, _ROW))
    found = [
        (row[:16].partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntop(socket.AF_INET, row[20:24]))
        for row in rows
    ]
    six = Path("/proc/net/if_inet6")
    for line in six.read_text().splitlines() if six.is_file() else ():
        digits, *_, name = line.split()
        found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found
