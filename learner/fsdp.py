"""PyTorch's FSDP2 around our models: which modules are gathered together, in which types, and what is summed.

    Root ── embedding, norms, output embedding, value head    one unit: gathered in Root.forward and its backward
      └── decoder layer × L                                   a unit each: gathered while it runs, forward and backward

The forward pass of ``Root`` runs a function. So the trunk may be called by itself (rows of trees), and the output
embedding be read outside of any ``forward``, chunk by chunk: all of it happens within the pass of the root.

Imported only where ``learner.strategy = "fsdp"``: distributed tensors take longer to import than torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from learner.group import LearnerGroup

T = TypeVar("T")


class Root(nn.Module):
    """What runs passes over some modules.

    Args:
        modules: by role.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(dict(modules))

    def forward(self, work: Callable[[], T]) -> T:
        """Run ``work``, with the root's own parameters gathered."""
        return work()


def shard(modules: Mapping[str, nn.Module], group: LearnerGroup, dtype: torch.dtype) -> Any:
    """Leave this rank a shard of each parameter, along its first axis, in place.

    Every rank must have made the modules, on the CPU or on its device; the values of rank 0 win. One unit after the
    other goes to the device, so that no device ever holds more than one of them whole.

    Args:
        modules: by role, their parameters all of one type.
        group: the ranks.
        dtype: that parameters are gathered in. Gradients are summed in float32.

    Returns:
        The :class:`Root`, which is an ``FSDPModule`` as well.
    """
    root = Root(modules)
    mesh = init_device_mesh(group.device.type, (group.world,))
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the embedding gives the right type; a micro-batch must stay as it is
    )
    seen: set[int] = set()
    for unit in (*layers_of(root), root):
        mine = [p for p in unit.parameters() if id(p) not in seen]
        for parameter in mine:
            parameter.data = parameter.data.to(group.device)
        group.broadcast_tensors(parameter.data for parameter in mine)
        fully_shard(unit, mesh=mesh, mp_policy=policy)
        seen |= {id(parameter) for parameter in unit.parameters()}
        # losses are over global counts: gradients are summed. Without the second line that is a scaled sum, which gloo
        # does not have
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    # what has no gradient on this rank (an expert without a token) may have one on another
    root.set_reduce_scatter_unused_params(True)
    return root


def layers_of(module: nn.Module) -> list[Any]:
    """The decoder layers within a module, by what transformers calls inseparable; those within others are left out."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    found: list[nn.Module] = []
    inside: set[int] = set()
    for part in module.modules():  # parents come first
        if type(part).__name__ in names and id(part) not in inside:
            found.append(part)
            inside |= {id(child) for child in part.modules()}
    return found


def units_of(root: nn.Module) -> Iterator[Any]:
    """What is gathered together: the layers, then the root with all the rest."""
    yield from (part for part in root.modules() if isinstance(part, FSDPModule) and part is not root)
    yield root


def run(root: Any, group: LearnerGroup, work: Callable[[], T]) -> T:
    """A pass without gradient.

    Afterwards nothing is gathered any more: what stayed would be out of date after the next update.
    """
    with torch.no_grad(), group.passing("a pass over the layers"):
        result: T = root(work)
        root.reset_iter_state()
    return result
