"""Models larger than a device: every rank has a shard of each tensor, its gradient and its moments.

    modules ──learner.fsdp──► shards, float32 master ──gather a layer──► compute type ──► forward, backward
                                 ▲                                                           │
                                 └── AdamW ◄── shard of the summed gradient ◄──reduce_scatter ┘
    scalars + squared norm of my shards ──► one small all_reduce ──► clip, or skip, on all ranks alike

Tensors have the places in the flat vector that they have in :class:`learner.flat.FlatParameters`: a version is the same
bytes, and a checkpoint the same files. A shard is some rows of its tensor, so it is one range of that vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch import nn

from async_rl.errors import ConfigError
from learner.fsdp import run, shard, units_of
from learner.group import LearnerGroup
from learner.optimizer import MOMENTS, adamw_step
from learner.parameters import Piece
from learner.slots import Slot, lay_out_by_role, size_of, slots_of, trainable

T = TypeVar("T")

_BITS = {4: torch.int32, 2: torch.int16}


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of one tensor that this rank has."""

    slot: Slot
    first: int
    """Element of the flat vector that it begins with."""
    parameter: Any
    """The distributed tensor."""
    owner: nn.Module
    """Module that has the tensor, whole while its unit is gathered, under ``attribute``."""
    attribute: str
    unit: Any
    """What is gathered together."""

    @property
    def values(self) -> torch.Tensor:
        """float32 master, possibly no row at all."""
        with torch.no_grad():
            local: torch.Tensor = self.parameter.to_local()
        return local

    @property
    def gradient(self) -> torch.Tensor:
        """Of the same shape."""
        with torch.no_grad():
            grad = self.parameter.grad
            local: torch.Tensor = torch.zeros_like(self.values) if grad is None else grad.to_local()
        return local


class ShardedParameters:
    """FSDP2's shards as :class:`learner.parameters.Parameters`.

    Args:
        modules: modules by role, as for :class:`learner.flat.FlatParameters`; every parameter is trained. They may lie
            on the CPU: one unit after the other goes to the device.
        group: of two ranks or more.
        num_scalars: length of the tail.
        dtype: compute type.

    Raises:
        ConfigError: some state or a frozen parameter would have to be kept beside the shards.
    """

    in_step = True
    """Ranks meet in every layer."""

    def __init__(
        self, modules: Mapping[str, nn.Module], group: LearnerGroup, num_scalars: int, dtype: torch.dtype
    ) -> None:
        _check(modules)
        self._group = group
        self.roles = tuple(modules)
        _, self.layout = lay_out_by_role(modules, list(trainable(modules)), [])
        self.size = size_of(self.layout)
        self._root = shard(modules, group, dtype)
        self.shards = tuple(_shards(modules, self.layout, self._root, group))
        self.reduced = torch.zeros(num_scalars + 1, dtype=torch.float64, device=group.device)
        self.tail = self.reduced[:num_scalars]

    @property
    def replicated(self) -> tuple[torch.Tensor, ...]:
        """Nothing: rank 0's values were taken when the shards were made."""
        return ()

    def slots(self, role: str) -> tuple[Slot, ...]:
        """Where the tensors of one module lie, under the names that they have in it."""
        return slots_of(self.layout, self.roles, role)

    def of(self, role: str) -> list[Shard]:
        """The shards of one module, in the order of :meth:`slots`."""
        mine = {slot.offset for slot in self.slots(role)}
        return [s for s in self.shards if s.slot.offset in mine]

    def refresh(self) -> None:
        """Nothing: every pass gathers what the shards are by then."""

    def zero_grad(self) -> None:
        """Clear gradient and tail."""
        for part in self.shards:
            part.parameter.grad = None
        self.reduced.zero_()

    def run(self, work: Callable[[], T]) -> T:
        """Forward passes; all ranks make as many."""
        return run(self._root, self._group, work)

    def backward(self, work: Callable[[], tuple[torch.Tensor, T]]) -> T:
        """Add the gradient of the loss that ``work`` returns beside something else; all ranks make as many."""
        with self._group.passing("a pass over the layers"):
            loss, rest = self._root(work)
            loss.backward()
        kept: T = rest
        return kept

    def finish_gradient(self) -> None:
        """Put the squared norm of this rank's gradient beside the scalars."""
        norms = torch.stack([torch.linalg.vector_norm(part.gradient) for part in self.shards])
        self.reduced[-1] = norms.double().square().sum()

    @property
    def norm(self) -> float:
        """Of the whole gradient, once :attr:`reduced` is summed: the same on all ranks."""
        return math.sqrt(float(self.reduced[-1]))

    def checksum(self) -> int:
        """xxh3-64 over :meth:`checksums`."""
        return int(xxhash.xxh3_64_intdigest(np.array(self.checksums(), np.uint64).tobytes()))

    def checksums(self) -> list[int]:
        """Of each tensor as this rank computes with it, gathered: the sum of its elements' bits."""
        sums = [tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64) for _, tensor in self._gathered()]
        return [int(number) % (1 << 64) for number in torch.stack(sums).cpu()]

    def pieces(self) -> Iterator[Piece]:
        """The first role's tensors in the compute type; one layer is gathered at a time."""
        for first, tensor in self._gathered(self.roles[0]):
            # on the CPU numpy may be given it, after which torch could not free the gathered layer any more
            yield first, tensor.clone() if tensor.device.type == "cpu" else tensor

    def assist(self) -> None:
        """Take part in the gathering, and look at nothing."""
        for _ in self._gathered(self.roles[0]):
            pass

    def _gathered(self, role: str | None = None) -> Iterator[Piece]:
        """First element and the whole tensor, valid until the next one; every rank must read all of them."""
        held = None
        self._gather(self._root)
        for part in self.shards if role is None else self.of(role):
            if part.unit is not held and part.unit is not self._root:
                if held is not None:
                    held.reshard()
                held = part.unit
                self._gather(held)
            yield part.slot.offset, getattr(part.owner, part.attribute).detach()
        for unit in (held, self._root):
            if unit is not None:
                unit.reshard()

    def _gather(self, unit: Any) -> None:
        with torch.no_grad(), self._group.passing("the gathering of the weights"):
            unit.unshard()


class ShardedAdamW:
    """AdamW on the shards; see :class:`learner.optimizer.FlatAdamW`.

    Args:
        parameters: their gradient must be reduced before :meth:`clip`.
        betas: decay rates of the two moments.
        weight_decay: decoupled decay.
    """

    def __init__(self, parameters: ShardedParameters, betas: tuple[float, float], weight_decay: float) -> None:
        self._parameters = parameters
        self._betas = betas
        self._weight_decay = weight_decay
        self._states = [
            {name: torch.zeros_like(part.values) for name in MOMENTS} | {"step": part.values.new_zeros(())}
            for part in parameters.shards
        ]

    @torch.no_grad()
    def clip(self, max_norm: float) -> float:
        """Scale the gradient to at most ``max_norm``; its norm before. One that is not finite stays as it is."""
        norm = self._parameters.norm
        if math.isfinite(norm) and norm > max_norm:
            for part in self._parameters.shards:
                if part.parameter.grad is not None:
                    part.gradient.mul_(max_norm / norm)
        return norm

    @torch.no_grad()
    def step(self, rates: Mapping[str, float]) -> None:
        """Update the shards with their gradient; ``rates`` by role."""
        states = {part.slot.offset: state for part, state in zip(self._parameters.shards, self._states, strict=True)}
        for role in self._parameters.roles:
            parts = self._parameters.of(role)
            adamw_step(
                [part.values for part in parts],
                [part.gradient for part in parts],
                {name: [states[part.slot.offset][name] for part in parts] for name in (*MOMENTS, "step")},
                lr=rates[role],
                betas=self._betas,
                weight_decay=self._weight_decay,
            )

    def parts(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """The part of this rank in the two vectors over the flat layout: name, first element, values on the CPU."""
        yield "step", 0, self._states[0]["step"].cpu()
        for part, moments in zip(self._parameters.shards, self._states, strict=True):
            yield from ((name, part.first, moments[name].flatten().cpu()) for name in MOMENTS)

    @torch.no_grad()
    def load(self, read: Callable[[str, int, int], torch.Tensor]) -> None:
        """Continue from a checkpoint, of any number of ranks.

        Args:
            read: gives the values of a vector from an element on: name, first element, how many.
        """
        steps = read("step", 0, 1)
        for part, moments in zip(self._parameters.shards, self._states, strict=True):
            moments["step"].copy_(steps[0])
            for name in MOMENTS:
                moments[name].copy_(read(name, part.first, moments[name].numel()).view(moments[name].shape))


def rows_of(count: int, rank: int, world: int) -> tuple[int, int]:
    """First row, and the one behind the last, that a rank has of ``count``: as ``torch.chunk`` cuts them."""
    each = -(-count // world)
    return min(rank * each, count), min((rank + 1) * each, count)


def _shards(
    modules: Mapping[str, nn.Module], layout: tuple[Slot, ...], root: nn.Module, group: LearnerGroup
) -> Iterator[Shard]:
    units = {id(part): unit for unit in reversed([*units_of(root)]) for part in unit.modules()}
    roles = tuple(modules)
    for role, module in modules.items():
        prefix = f"{role}." if len(roles) > 1 else ""
        for slot in (s for s in layout if s.name.startswith(prefix)):
            path, _, attribute = slot.name.removeprefix(prefix).rpartition(".")
            owner = module.get_submodule(path)
            parameter = getattr(owner, attribute)
            start, stop = rows_of(slot.shape[0], group.rank, group.world)
            length = math.prod(slot.shape[1:])
            if tuple(parameter.to_local().shape) != (stop - start, *slot.shape[1:]):
                raise RuntimeError(f"{slot.name}: rank {group.rank} has {list(parameter.to_local().shape)}")
            yield Shard(slot, slot.offset + start * length, parameter, owner, attribute, units[id(owner)])


def _check(modules: Mapping[str, nn.Module]) -> None:
    """Make sure that shards of parameters are all that there is to keep.

    Raises:
        ConfigError: names what is not, and what to set.
    """
    frozen = [name for module in modules.values() for name, p in module.named_parameters() if not p.requires_grad]
    kept = [
        name
        for module in modules.values()
        for name in module.state_dict()
        if name not in {n for n, _ in module.named_parameters(remove_duplicate=False)}
    ]
    if frozen or kept:
        raise ConfigError(
            f"learner.strategy = 'fsdp' trains models whose state is parameters alone; this one has "
            f"{', '.join((frozen + kept)[:5])} beside them: set learner.strategy = 'flat'"
        )
