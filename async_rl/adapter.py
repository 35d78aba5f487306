"""A low-rank adapter on its way from learner to engines: how its tensors are called, and which two belong together.

in the learner   model.layers.0.self_attn.q_proj.lora_A.default.weight      (peft's layer, adapter ``default``)
published        model.layers.0.self_attn.q_proj.lora_A.weight              [rank, in]; lora_B: [out, rank]
in a file        base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.errors import WeightsError
from async_rl.weights.manifest import Manifest, Tensor

FILE_PREFIX = "base_model.model."
"""What peft puts before the names of a saved adapter."""

_IN_LEARNER = ".default.weight"
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class Pair:
    """The adapter of one linear layer: it adds ``scale · B A x``."""

    module: str
    """Name of the layer in the model."""
    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank]"""


def published_name(name: str) -> str:
    """The name under which a trained parameter is published; that of a whole model's parameter stays as it is."""
    if name.endswith((f".lora_A{_IN_LEARNER}", f".lora_B{_IN_LEARNER}")):
        return name.removesuffix(_IN_LEARNER) + ".weight"
    return name


def names_of(module: str) -> tuple[str, str]:
    """The published names of A and B of a layer."""
    return module + _A, module + _B


def pairs(manifest: Manifest, rank: int) -> tuple[Pair, ...]:
    """What a version brings to which layer, in order of its tensors.

    Args:
        manifest: of the version.
        rank: of the adapter.

    Raises:
        WeightsError: it is not made of pairs of this rank.
    """
    found = {tensor.name: tensor for tensor in manifest.tensors}
    modules = [name.removesuffix(_A) for name in found if name.endswith(_A)]
    if len(found) != len(manifest.tensors) or len(found) != 2 * len(modules):
        raise WeightsError(
            f"version {manifest.version} is no adapter, or names a tensor twice: {len(manifest.tensors)} tensors, "
            f"{len(modules)} of them {_A}; use the same lora.rank on both sides"
        )
    made = []
    for module in modules:
        a, b = (found.get(name) for name in names_of(module))
        if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or not a.shape[0] == b.shape[1] == rank:
            raise WeightsError(
                f"version {manifest.version}: the adapter of {module} is no pair [{rank}, in], [out, {rank}]; use the "
                "same lora.rank on both sides"
            )
        made.append(Pair(module, a, b))
    return tuple(made)
