"""The learner group: its ranks, their device, and the few collectives they make.

    torchrun, on each host ─► WORLD_SIZE, LOCAL_RANK ─► LearnerGroup ─► cuda:{local_rank} with NCCL, or CPU with gloo

A group of one needs no torchrun, goes through the same code and makes no collective. Where several ranks find each
other is in :mod:`learner.meeting`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from async_rl.errors import AsyncRLError, ConfigError, StartAgainError
from async_rl.models import device_for
from learner.meeting import Meet, meet_in_a_file
from learner.parameters import Parameters


@dataclass(frozen=True, slots=True)
class Placement:
    """Which of how many ranks this process is, and where it computes."""

    rank: int
    world: int
    device: torch.device
    local_rank: int = 0
    """Among the ranks of its host."""
    hosts: int = 1
    """Over which the ranks are spread."""


def read_placement(environment: Mapping[str, str], ranks: int, device: str, hosts: int = 1, host: int = 0) -> Placement:
    """Work out this process's place from torchrun's variables; one rank alone needs none of them.

    Args:
        environment: usually ``os.environ``.
        ranks: ``learner.ranks`` of the configuration, over all hosts.
        device: ``config.device``: auto, cpu or cuda.
        hosts: over which they are spread evenly.
        host: this one, from 0; its ranks follow those of the hosts before.

    Raises:
        ConfigError: several ranks, but not started by torchrun; another number than configured, or too few GPUs.
    """
    here = ranks // hosts
    if here == 1 and "WORLD_SIZE" not in environment:
        return Placement(host, ranks, device_for(device, 0), hosts=hosts)
    missing = [name for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if name not in environment]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: start the learner with "
            f"`torchrun --nproc-per-node {here} -m learner.main CONFIG.toml ...`"
        )
    world, local_rank = (int(environment[name]) for name in ("WORLD_SIZE", "LOCAL_RANK"))
    if world != here:
        of_all = f" on each of {hosts} hosts" if hosts > 1 else ""
        raise ConfigError(f"torchrun started {world} ranks but learner.ranks = {ranks}{of_all}: make them equal")
    return Placement(host * here + local_rank, ranks, device_for(device, local_rank, here), local_rank, hosts)


class LostRanksError(StartAgainError):
    """Another rank has died or is frozen; the message names this rank, the operation and the step."""


class LearnerGroup:
    """Collectives over the ranks, each with the deadline ``timeout_s``.

    With NCCL a collective blocks its caller: without that (``TORCH_NCCL_BLOCKING_WAIT``) the watchdog ends the process
    at the deadline, and nothing says who waited for what. The caller reads the reduced scalars next: it costs nothing.

    Args:
        placement: see :func:`read_placement`.
        timeout_s: deadline of a collective; a rank that died ends the others within it.
        meet: where the ranks find each other.

    Raises:
        LostRanksError: not all ranks came.
    """

    def __init__(self, placement: Placement, timeout_s: float, meet: Meet = meet_in_a_file) -> None:
        self.rank = placement.rank
        self.local_rank = placement.local_rank
        self.hosts = placement.hosts
        self.world = placement.world
        self.device = placement.device
        self.step: int | None = None
        """That the ranks are in, for the sentence about a lost one; ``None`` before the first."""
        self._timeout_s = timeout_s
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world > 1:
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            store = meet(self.rank, self.world)
            store.set_timeout(timedelta(seconds=timeout_s))
            with self._together("the start of the group"):
                dist.init_process_group(
                    "nccl" if self.device.type == "cuda" else "gloo",
                    store=store,
                    rank=self.rank,
                    world_size=self.world,
                    timeout=timedelta(seconds=timeout_s),
                    device_id=self.device if self.device.type == "cuda" else None,
                )

    @classmethod
    def start(cls, ranks: int, device: str, timeout_s: float) -> LearnerGroup:
        """Join the group that torchrun's environment describes; errors as :func:`read_placement`."""
        return cls(read_placement(os.environ, ranks, device), timeout_s)

    def all_reduce_flat(self, flat: Parameters) -> None:
        """Sum gradient and scalar tail over the ranks: the one collective of an update that is not part of a pass."""
        if self.world > 1:
            with self._together("the all_reduce of the gradients"):
                dist.all_reduce(flat.reduced)

    def broadcast_flat(self, flat: Parameters) -> None:
        """Give every rank the parameters of rank 0, so far as it holds a copy of them."""
        self.broadcast_tensors(flat.replicated)
        flat.refresh()

    def broadcast_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give every rank the values of rank 0, in place."""
        for tensor in tensors if self.world > 1 else ():
            with self._together("the broadcast of the parameters"):
                dist.broadcast(tensor, src=0)

    def broadcast_number(self, number: float) -> float:
        """Give every rank a number that rank 0 read from outside (a learning rate)."""
        if self.world == 1:
            return number
        tensor = torch.tensor([number], dtype=torch.float64, device=self.device)
        with self._together("the broadcast of a number"):
            dist.broadcast(tensor, src=0)
            return float(tensor)

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Give every rank the bytes of rank 0; what the others pass is not looked at."""
        size = int(self.broadcast_number(float(len(data))))
        if self.world == 1 or not size:
            return data if self.world == 1 else b""
        block = torch.frombuffer(bytearray(data if self.rank == 0 else size), dtype=torch.uint8).to(self.device)
        with self._together("the broadcast of bytes"):
            dist.broadcast(block, src=0)
            return block.cpu().numpy().tobytes()

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

    def max_over_ranks(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self.world == 1:
            return number
        tensor = torch.tensor([number], device=self.device)
        with self._together("the comparison of numbers"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            return int(tensor)

    def share_slices(self, vector: torch.Tensor, each: int) -> None:
        """Give every rank the slices of the others: rank r has elements ``r · each`` to ``(r + 1) · each``."""
        if self.world == 1 or not each:
            return
        mine = vector[self.rank * each : (self.rank + 1) * each]
        with self._together("the exchange of updated slices"):
            # NCCL gathers in place, gloo does not say so
            dist.all_gather_single(vector[: self.world * each], mine if mine.is_cuda else mine.clone())

    def gather_parts(self, first: int, values: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """On rank 0 the parts of all ranks, with the numbers that they pass beside them; on the others nothing.

        Args:
            first: where the part belongs.
            values: of any length, the same type on all ranks; they come from the CPU and go back there.
        """
        if self.world == 1:
            return [(first, values)]
        mine = torch.tensor([first, values.numel()], device=self.device)
        with self._together("the gathering of parts"):
            places = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(places, mine)
            longest = max(int(place[1]) for place in places)
            padded = torch.zeros(longest, dtype=values.dtype, device=self.device)
            padded[: values.numel()] = values.flatten()
            found = [torch.empty_like(padded) for _ in places] if self.rank == 0 else None
            dist.gather(padded, found, dst=0)
            return [(int(p[0]), part[: int(p[1])].cpu()) for p, part in zip(places, found or (), strict=False)]

    def all_agree(self, willing: bool) -> bool:
        """Whether all ranks are willing to go on; keeps one from entering a collective that another will not join."""
        if self.world == 1:
            return willing
        tensor = torch.tensor([int(willing)], device=self.device)
        with self._together("the vote on going on"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
            return bool(tensor.item())

    def check_equal(self, flat: Parameters) -> None:
        """Compare through their checksums the parameters that the ranks compute with.

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

    @contextmanager
    def passing(self, operation: str) -> Iterator[None]:
        """Work with collectives inside: the loss of a rank becomes one sentence, other errors stay what they are."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            raise self._lost(operation, error) from error

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
            raise self._lost(operation, error) from error

    def _lost(self, operation: str, error: RuntimeError) -> LostRanksError:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        when = "before the first step" if self.step is None else f"of step {self.step}"
        return LostRanksError(
            f"rank {self.rank} has lost the others in {operation} {when}: one has died, or did not join within "
            f"learner.timeout_s = {self._timeout_s:g} s ({said[:160]})"
        )
