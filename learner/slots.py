"""Where each tensor of what is trained lies in one flat vector; the same whether a rank holds all of it or a shard.

modules by role ─► parameters of a role, then its state, each once ─► Slot(name, shape, offset), offsets aligned
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

ALIGN = 32
"""Elements: a multiple of 128 bytes in float32, of 64 in bfloat16."""


class Slot(NamedTuple):
    """Where one tensor lies in the flat vector; offsets and sizes count elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int


def view_of(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The tensor of ``slot`` as a view of a flat vector ``[size]``."""
    return flat[slot.offset : slot.offset + slot.numel].view(slot.shape)


def slots_of(layout: tuple[Slot, ...], roles: tuple[str, ...], role: str) -> tuple[Slot, ...]:
    """The slots of one module of several, under the names that they have in it."""
    if len(roles) == 1:
        return layout
    prefix = f"{role}."
    return tuple(s._replace(name=s.name.removeprefix(prefix)) for s in layout if s.name.startswith(prefix))


def size_of(layout: tuple[Slot, ...]) -> int:
    """Elements of the vector, the last gap included."""
    return aligned(layout[-1].offset + layout[-1].numel)


def trainable(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters, each once; with several modules their names carry the role."""
    seen: set[int] = set()
    for role, module in modules.items():
        prefix = f"{role}." if len(modules) > 1 else ""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield prefix + name, parameter


def state(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers and frozen parameters, each once."""
    seen: set[int] = set()
    for role, module in modules.items():
        prefix = f"{role}." if len(modules) > 1 else ""
        frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        for name, tensor in (*frozen, *module.named_buffers()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield prefix + name, tensor


def lay_out_by_role(
    modules: Mapping[str, nn.Module],
    named: list[tuple[str, nn.Parameter]],
    states: list[tuple[str, torch.Tensor]],
) -> tuple[list[torch.Tensor], tuple[Slot, ...]]:
    """Parameters of a module, then its state, then the next module's: the tensors and their slots, in that order."""
    ordered: list[tuple[str, torch.Tensor]] = []
    for role in modules:
        for found in (named, states):
            ordered += [(n, t) for n, t in found if len(modules) == 1 or n.partition(".")[0] == role]
    return [tensor for _, tensor in ordered], _lay_out(ordered)


def aligned(offset: int) -> int:
    """The next offset at which a tensor may begin."""
    return -(-offset // ALIGN) * ALIGN


def _lay_out(named: list[tuple[str, torch.Tensor]]) -> tuple[Slot, ...]:
    slots, offset = [], 0
    for name, parameter in named:
        shape = tuple(parameter.shape)
        slots.append(Slot(name, shape, offset, math.prod(shape)))
        offset = aligned(offset + math.prod(shape))
    return tuple(slots)
