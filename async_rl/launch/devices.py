"""Which device each process of a host gets, and that no other command has it for the same purpose.

visible GPUs ─► one a process ─► a local name, bound as long as the command runs (abstract socket: no file)

An actor and a learner may share a device. Two actors, or two groups of ranks, would run out of memory much later, with
an error that does not say why.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from async_rl.errors import ConfigError

_CONNECT_S = 1.0


def one_each(gpus: Sequence[str], processes: int, option: str) -> list[str]:
    """Device of each process; empty where there are none, so that all compute on the CPU.

    Args:
        gpus: that may be used.
        processes: on this host.
        option: that asks for so many, for the message.

    Raises:
        ConfigError: there are fewer devices than processes.
    """
    if not gpus:
        return []
    if processes > len(gpus):
        raise ConfigError(
            f"{option}: {processes} processes here, but {len(gpus)} devices ({', '.join(gpus)}), and each needs its "
            "own; ask for fewer, or check CUDA_VISIBLE_DEVICES"
        )
    return list(gpus[:processes])


def check_broadcast(assigned: Mapping[str, str], actors: int) -> None:
    """Check that rank 0 and the actors have a device each, as NCCL needs it to broadcast weights between them.

    Args:
        assigned: ``CUDA_VISIBLE_DEVICES`` by process; empty without GPUs.
        actors: number of actors.

    Raises:
        ConfigError: two of them share one.
    """
    members = ["learner", *(f"actor{i}" for i in range(actors))] if assigned else []
    devices = [assigned[name].partition(",")[0] for name in members]
    if len(set(devices)) < len(devices):
        shown = ", ".join(f"{name}: {device}" for name, device in zip(members, devices, strict=True))
        raise ConfigError(
            "weights.path = 'broadcast' needs a device of its own for the learner's first rank and for each actor, but "
            f"there are too few ({shown}): set weights.path = 'auto', or a lower actors.count"
        )


@contextmanager
def claimed(devices: Iterable[str], purpose: str) -> Iterator[None]:
    """Hold these devices while the block runs.

    Args:
        devices: identifiers as in ``CUDA_VISIBLE_DEVICES``.
        purpose: ``actor`` or ``learner``.

    Raises:
        ConfigError: another command on this host has one of them.
    """
    with ExitStack() as stack:
        for device in devices:
            name = f"\0async_rl-device-{purpose}-{device}"[:100]
            claim = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                claim.bind(name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                raise ConfigError(
                    f"device {device} is used by another async-rl {purpose} on this host{_owner(name)}: end that one, "
                    "or give each command its own devices with CUDA_VISIBLE_DEVICES"
                ) from None
            claim.listen()
        yield


def _owner(name: str) -> str:
    """Which process has a name, as far as the kernel tells."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_CONNECT_S)
        try:
            line.connect(name)
        except OSError:
            return ""
        pid, _, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return f" (process {pid})" if pid else ""
