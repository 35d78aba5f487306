"""Over which hosts the ranks of a learner group are spread, and what this host needs to know of that. Pure.

    --nnodes N --node-rank R --rendezvous HOST:PORT ─► LearnerHosts ─► ranks here, folder here, where the server is

Host 0 has the buffer server, the evaluator and rank 0. The rendezvous is that server's address: ranks muster there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from async_rl.curve import is_loopback
from async_rl.errors import ConfigError

FOLDER = re.compile(r"host\d+")
"""Folders of further hosts inside a run folder, should they share it."""
_ADDRESS = re.compile(r"(\[[^\]]+\]|[^:/*\s]+):(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerHosts:
    """All learner hosts, seen from one of them."""

    count: int = 1
    index: int = 0
    """Of this host."""
    address: str = ""
    """Of the buffer server, as all hosts reach it: ``tcp://HOST:PORT``; empty with one host."""

    @classmethod
    def of(cls, count: int, index: int, rendezvous: str | None, *, trusted: bool) -> LearnerHosts:
        """From the arguments of a command.

        Args:
            count: ``--nnodes``.
            index: ``--node-rank``.
            rendezvous: ``--rendezvous``.
            trusted: ``--trusted-network``.

        Raises:
            ConfigError: they contradict each other, or the ranks would talk over a network that nobody vouches for.
        """
        if not 0 <= index < count:
            raise ConfigError(f"--node-rank {index} of --nnodes {count}: hosts are numbered from 0 to {count - 1}")
        if count == 1:
            if rendezvous is not None:
                raise ConfigError("--rendezvous has no effect with one learner host; add --nnodes N, or remove it")
            return cls()
        match = _ADDRESS.fullmatch((rendezvous or "").removeprefix("tcp://"))
        if match is None or not 0 < int(match[2]) < 65536:
            raise ConfigError(
                f"--nnodes {count} needs --rendezvous HOST:PORT on every host: the address of the first, where its "
                f"buffer server listens{f', not {rendezvous!r}' if rendezvous else ''}"
            )
        if not (trusted or is_loopback(match[1].strip("[]"))):
            raise ConfigError(
                f"--nnodes {count}: gradients and parameters go between learner hosts through gloo or NCCL, which "
                "neither encrypt nor know each other; if nobody else can reach that network, say so with "
                "--trusted-network on every host"
            )
        return cls(count=count, index=index, address=f"tcp://{match[0]}")

    @property
    def is_first(self) -> bool:
        """Whether this host has the buffer server."""
        return self.index == 0

    def ranks_here(self, ranks: int) -> int:
        """Ranks of each host.

        Args:
            ranks: ``learner.ranks``, over all hosts.

        Raises:
            ConfigError: they cannot be spread evenly.
        """
        if ranks % self.count:
            raise ConfigError(
                f"learner.ranks = {ranks} is the number over all hosts: make it a multiple of --nnodes {self.count}"
            )
        return ranks // self.count

    def options(self, index: int) -> str:
        """What is typed on host ``index``, beside its configuration and keys."""
        place = self.address.removeprefix("tcp://")
        trusted = "" if is_loopback(place.rpartition(":")[0].strip("[]")) else " --trusted-network"
        return f"--nnodes {self.count} --node-rank {index} --rendezvous {place}{trusted}"

    def folder(self, out: Path) -> Path:
        """Where this host keeps its own files of a run, whether it shares the run folder with the first or not."""
        return own_folder(out, self.index)


ONE_HOST = LearnerHosts()


def own_folder(out: Path, index: int) -> Path:
    """Folder of host ``index`` in the run folder ``out``: the run folder itself for the first."""
    return out if index == 0 else out / f"host{index}"
