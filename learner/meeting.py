"""Where the ranks of a life of the learner group find each other, and over which interface they then talk.

one host      ─► a file in the run's temporary folder, and the loopback
several hosts ─► muster at the buffer server, which knows them by their keys ─► a store of rank 0, new in each life

torchrun's own meeting over several hosts is not used: its store listens on all interfaces, and what stands in it is
unpickled.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from async_rl.client import Client, Stopped
from async_rl.config import RunConfig
from async_rl.config.shared import shared_settings
from async_rl.curve import ClientKeys
from async_rl.errors import AsyncRLError, HandshakeError, StartAgainError
from async_rl.interfaces import interface_of, listen, use_interface
from async_rl.route import joined, parted, route_to

SERVER_TIMEOUT_S = 600.0
"""The first host may still build a model when another one is ready."""
STORE_TIMEOUT_S = 60.0
"""Ranks that have mustered are all alive: they are in the store within this time."""
_INTERFACES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}

Meet = Callable[[int, int], dist.Store]
"""(rank, world) ─► the store with which the process group is made."""


def meet_in_a_file(rank: int, world: int) -> dist.Store:
    """Of ranks on one host: a port would be open to everybody who has an account there, or more."""
    use_interface("lo")
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # the ranks' common parent is torchrun, which draws a port for each life: no file is met twice
    name = f"async_rl-ranks-{os.getppid()}-{os.environ.get('MASTER_PORT', '')}-{life}"
    return dist.FileStore(str(Path(tempfile.gettempdir()) / name), world)


@dataclass(frozen=True, slots=True)
class Muster:
    """Of ranks on several hosts; call it as :data:`Meet`.

    Args:
        server: address of the buffer server, ``tcp://HOST:PORT``, as this host reaches it.
        config: the run.
        group: what all ranks must have in common beside the configuration, see :func:`kind_of_group`.
        ended: whether this process was asked to end.
    """

    server: str
    config: RunConfig
    group: str
    ended: Callable[[], bool]

    def __call__(self, rank: int, world: int) -> dist.Store:
        """Wait for the others at the server, then in the store of rank 0.

        Raises:
            HandshakeError: the server refuses us: another configuration, a number that is taken, the run is over.
            DeadlineError: the server, or the other ranks, did not come in time.
            StartAgainError: one of them died just now.
            AsyncRLError: the run has failed meanwhile, or this process was asked to end.
            ConfigError: there is no way to the server, or no interface has the address from which we reach it.
        """
        here, _ = route_to(self.server)
        if not os.environ.keys() >= _INTERFACES:
            use_interface(interface_of(here))
        listening = listen(here) if rank == 0 else None
        host, port = parted(self._ask(rank, world, joined(*listening.getsockname()[:2]) if listening else ""))
        return _open_store(host, port, rank, world, listening)

    def _ask(self, rank: int, world: int, mine: str) -> str:
        """The address of rank 0's store."""
        config = self.config
        name = f"rank{rank}-{socket.gethostname()[:80]}-{os.getpid()}"
        contract, keys = config.contract_hash(), ClientKeys.of(config.buffer.keys)
        with Client(self.server, "recruit", name, contract, rank=rank, world=world, keys=keys) as client:
            try:
                client.connect(SERVER_TIMEOUT_S, self.ended)
                header, _ = client.request(
                    "muster",
                    "mustered",
                    config.learner.step_deadline_s,
                    self.ended,
                    settings=shared_settings(config),
                    group=self.group,
                    store=mine,
                )
            except Stopped as stop:
                why = f"rank {rank}: the run ended before all ranks were there: {stop.reason}"
                if stop.error or self.ended():
                    raise AsyncRLError(why) from None
                raise HandshakeError(why, "over") from None
        return str(header["store"])


def kind_of_group(hosts: int, device: torch.device) -> str:
    """What ranks must have in common although no setting says so: ``2 hosts, cpu, torch 2.13.0``.

    Another backend, or another version of it, would fail in the first collective with a message about neither.
    """
    return f"{hosts} hosts, {device.type}, torch {torch.__version__}"


def _open_store(host: str, port: int, rank: int, world: int, listening: socket.socket | None) -> dist.Store:
    """Rank 0 serves the store; nobody goes on before all are there, or a dead one would be waited for much longer."""
    deadline = timedelta(seconds=STORE_TIMEOUT_S)
    served = None if listening is None else listening.detach()
    try:
        store = dist.TCPStore(
            host, port, world, served is not None, deadline, wait_for_workers=False, master_listen_fd=served
        )
        store.set(f"here_{rank}", b"1")
        store.wait([f"here_{other}" for other in range(world)], deadline)
    except RuntimeError as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise StartAgainError(
            f"rank {rank}: not all ranks came to {host}:{port} within {STORE_TIMEOUT_S:g} s: one has died just now, or "
            f"a firewall between the learner hosts closes ports ({said[:160]})"
        ) from None
    return store
