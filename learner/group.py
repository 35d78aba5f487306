"""The learner group: its ranks, their device, and the few collectives they make.

    torchrun ─► WORLD_SIZE, RANK, LOCAL_RANK ─► LearnerGroup ─► cuda:{local_rank} with NCCL, or the CPU with gloo

A group of one needs no torchrun, goes through the same code and makes no collective.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from async_rl.errors import AsyncRLError, ConfigError, StartAgainError
from async_rl.models import device_for
from learner.flat import FlatParameters


@dataclass(frozen=True, slots=True)
class Placement:
    """Which of how many ranks this process is, and where it computes."""

    rank: int
    world: int
    device: torch.device


def read_placement(environment: Mapping[str, str], ranks: int, device: str) -> Placement:
    """Work out this process's place from torchrun's variables; one rank alone needs none of them.

    Args:
        environment: usually ``os.environ``.
        ranks: ``learner.ranks`` of the configuration.
        device: ``config.device``: auto, cpu or cuda.

    Raises:
        ConfigError: several ranks, but not started by torchrun; another number than configured, or too few GPUs.
    """
    if ranks == 1 and "WORLD_SIZE" not in environment:
        return Placement(0, 1, device_for(device, 0))
    missing = [name for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if name not in environment]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: start the learner with "
            f"`torchrun --nproc-per-node {ranks} -m learner.main CONFIG.toml ...`"
        )
    world, rank, local_rank = (int(environment[name]) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    if world != ranks:
        raise ConfigError(f"torchrun started {world} ranks but learner.ranks = {ranks}: make them equal")
    local_world = int(environment.get("LOCAL_WORLD_SIZE", world))
    return Placement(rank, world, device_for(device, local_rank, local_world))


class LostRanksError(StartAgainError):
    """Another rank has died or is frozen; the message names this rank, the operation and the step."""


class LearnerGroup:
    """Collectives over the ranks, each with the deadline ``timeout_s``.

    With NCCL a collective blocks its caller: without that (``TORCH_NCCL_BLOCKING_WAIT``) the watchdog ends the process
    at the deadline, and nothing says who waited for what. The caller reads the reduced scalars next: it costs nothing.

    Args:
        placement: see :func:`read_placement`.
        timeout_s: deadline of a collective; a rank that died ends the others within it.

    Raises:
        LostRanksError: not all ranks came.
    """

    def __init__(self, placement: Placement, timeout_s: float) -> None:
        self.rank = placement.rank
        self.world = placement.world
        self.device = placement.device
        self.step: int | None = None
        """That the ranks are in, for the sentence about a lost one; ``None`` before the first."""
        self._timeout_s = timeout_s
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world > 1:
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            with self._together("the start of the group"):
                store, rank, world = _meeting_place(timedelta(seconds=timeout_s))
                dist.init_process_group(
                    "nccl" if self.device.type == "cuda" else "gloo",
                    store=store,
                    rank=rank,
                    world_size=world,
                    timeout=timedelta(seconds=timeout_s),
                    device_id=self.device if self.device.type == "cuda" else None,
                )

    @classmethod
    def start(cls, ranks: int, device: str, timeout_s: float) -> LearnerGroup:
        """Join the group that torchrun's environment describes; errors as :func:`read_placement`."""
        return cls(read_placement(os.environ, ranks, device), timeout_s)

    def all_reduce_flat(self, flat: FlatParameters) -> None:
        """Sum gradient and scalar tail over the ranks: the one collective of an update."""
        if self.world > 1:
            with self._together("the all_reduce of the gradients"):
                dist.all_reduce(flat.grad_and_tail)

    def broadcast_flat(self, flat: FlatParameters) -> None:
        """Give every rank the parameters of rank 0."""
        if self.world > 1:
            with self._together("the broadcast of the parameters"):
                dist.broadcast(flat.data, src=0)
        flat.refresh()

    def broadcast_number(self, number: float) -> float:
        """Give every rank a number that rank 0 read from outside (a learning rate)."""
        if self.world == 1:
            return number
        tensor = torch.tensor([number], dtype=torch.float64, device=self.device)
        with self._together("the broadcast of a number"):
            dist.broadcast(tensor, src=0)
            return float(tensor)

    def draw_name(self) -> str:
        """A random name for this life of the group, the same on all ranks."""
        return f"{int(self.broadcast_number(float(secrets.randbits(52)))):013x}"

    def sum_over_ranks(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum a few float64 numbers over the ranks; they come from the CPU and go back there."""
        if self.world == 1:
            return numbers
        summed = numbers.to(self.device, copy=True)
        with self._together("the sum of numbers over the ranks"):
            dist.all_reduce(summed)
            return summed.cpu()

    def all_agree(self, willing: bool) -> bool:
        """Whether all ranks are willing to go on; keeps one from entering a collective that another will not join."""
        if self.world == 1:
            return willing
        tensor = torch.tensor([int(willing)], device=self.device)
        with self._together("the vote on going on"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
            return bool(tensor.item())

    def check_equal(self, flat: FlatParameters) -> None:
        """Compare the ranks' parameters byte for byte through their checksums.

        Raises:
            AsyncRLError: on every rank, naming the tensors that differ.
        """
        if self.world == 1 or len(set(self._gather([flat.checksum()]))) == 1:
            return
        per_rank = [self._gather([value]) for value in flat.checksums()]
        differing = [slot.name for slot, values in zip(flat.layout, per_rank, strict=True) if len(set(values)) > 1]
        shown = ", ".join(differing[:10]) + (f" and {len(differing) - 10} more" if len(differing) > 10 else "")
        raise AsyncRLError(
            f"the ranks hold different parameters: {shown or 'only the gaps between tensors'}; something wrote to them "
            "outside the flat update (every rank must apply the same reduced gradient)"
        )

    def close(self) -> None:
        """Leave the group."""
        if self.world > 1:
            dist.destroy_process_group()

    def _gather(self, values: list[int]) -> list[int]:
        """One unsigned 64-bit number per rank."""
        mine = torch.tensor([v - (1 << 63) for v in values], dtype=torch.int64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        with self._together("the comparison of checksums"):
            dist.all_gather(everyone, mine)
            return [int(t) for t in everyone]

    @contextmanager
    def _together(self, operation: str) -> Iterator[None]:
        """A collective: what the backend raises when another rank is lost becomes one sentence."""
        try:
            yield
        except RuntimeError as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            when = "before the first step" if self.step is None else f"of step {self.step}"
            raise LostRanksError(
                f"rank {self.rank} has lost the others in {operation} {when}: one has died, or did not join within "
                f"learner.timeout_s = {self._timeout_s:g} s ({said[:160]})"
            ) from error


def _meeting_place(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Where the ranks of this life find each other: store, rank, world.

    On one host it is a file, and the ranks talk over the loopback: torchrun's own store would listen on all interfaces,
    and let in everybody. torchrun gives every life of a group over several hosts the same store, in which the addresses
    of the dead still stand: each life needs names of its own, or it now and then waits for a rank that is no more.
    """
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if int(os.environ.get("LOCAL_WORLD_SIZE", world)) < world:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        return dist.PrefixStore(f"life_{life}", store), rank, world
    for backend in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo")
    # the ranks' common parent is torchrun, which draws a port for each life: no file is met twice
    name = f"async_rl-ranks-{os.getppid()}-{os.environ.get('MASTER_PORT', '')}-{life}"
    files = dist.FileStore(str(Path(tempfile.gettempdir()) / name), world)
    files.set_timeout(timeout)
    return files, rank, world
