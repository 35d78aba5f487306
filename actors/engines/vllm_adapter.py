"""Inside vLLM's worker: a version of an adapter goes into vLLM's LoRA slot; what the slot holds is proven bit by bit.

between two steps   AdapterVersion(...) ─► each layer of the version has its place among vLLM's (fused) layers
while paused        load() ─► copy of the tensors ─► LoRAModel ─► slot ─► read back: A, and B times α/r, equal? rest 0?

Requests name the adapter by one id that stays the same, so that those which run go on with the new version. vLLM's own
steps of a weight update are left out: their end takes all adapters away, because it follows a change of the base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from actors.engines.readback import tensors
from actors.engines.vllm_settings import ADAPTER_ID
from async_rl.adapter import Pair, names_of, pairs
from async_rl.config import LoraConfig
from async_rl.errors import WeightsError
from async_rl.weights.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Place:
    """Where vLLM has the two matrices of a layer."""

    a: torch.Tensor
    """[slots, 1, most rank, in]"""
    b: torch.Tensor
    """[slots, 1, out, most rank]"""


class AdapterVersion:
    """A version that fits vLLM's layers; nothing is changed before :meth:`load`.

    Args:
        manager: of vLLM's adapters: ``model.lora_manager``.
        manifest: what was published.
        data: its bytes.
        lora: rank, scale and target layers.

    Raises:
        WeightsError: a layer, which is named, has no place, or one of another shape.
    """

    def __init__(self, manager: Any, manifest: Manifest, data: memoryview, lora: LoraConfig) -> None:
        self._manager, self._manifest, self._data, self._lora = manager, manifest, data, lora
        self._places = {pair.module: place(manager, pair) for pair in pairs(manifest, lora.rank)}

    def load(self) -> tuple[str, str]:
        """Put it into the slot; the checksum of the version, or what is wrong, the other one empty."""
        own = {name: tensor.clone() for name, tensor in tensors(self._manifest, self._data)}
        try:
            self._manifest.verify(self._data)  # so the copies are what was published
            self._fill(own)
            self._prove(own)
        except WeightsError as error:
            return "", str(error)
        return self._manifest.checksum, ""

    def _fill(self, own: dict[str, torch.Tensor]) -> None:
        lora = self._lora
        helper = PEFTHelper.from_dict(
            {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.targets)},
        )
        copies = {name: tensor.clone() for name, tensor in own.items()}  # vLLM scales B in place
        dtype = self._manager.lora_config.lora_dtype
        try:
            model = LoRAModel.from_lora_tensors(ADAPTER_ID, copies, helper, device="cpu", dtype=dtype)
            self._manager.remove_adapter(ADAPTER_ID)
            self._manager.add_adapter(model)
            self._manager.activate_adapter(ADAPTER_ID)
        except Exception as error:  # a boundary: vLLM's adapters raise anything
            raise WeightsError(
                f"version {self._manifest.version}: vLLM does not take the adapter: {error!r}"
            ) from error

    def _prove(self, own: dict[str, torch.Tensor]) -> None:
        slot, rank = self._manager.lora_index_to_id.index(ADAPTER_ID), self._lora.rank
        for module, where in self._places.items():
            a, b = (own[name] for name in names_of(module))
            held_a, held_b = where.a[slot, 0].cpu(), where.b[slot, 0].cpu()
            if not (
                torch.equal(held_a[:rank], a)
                and torch.equal(held_b[:, :rank], b * self._lora.scale)
                and not held_a[rank:].any()
                and not held_b[:, rank:].any()
            ):
                raise WeightsError(
                    f"version {self._manifest.version}: vLLM's slot does not hold the adapter of {module} as it was "
                    "published"
                )


def place(manager: Any, pair: Pair) -> Place:
    """Find where vLLM has the adapter of a layer: in a layer of that name, or in a part of a fused one.

    Raises:
        WeightsError: nowhere, or its shape is another one.
    """
    for name, layer in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        if pair.module in parts and len(parts) == len(layer.lora_a_stacked) == len(layer.lora_b_stacked):
            index = parts.index(pair.module)
            found = Place(layer.lora_a_stacked[index], layer.lora_b_stacked[index])
            rank, width = pair.a.shape
            if rank <= found.a.shape[2] and width == found.a.shape[3] and pair.b.shape[0] == found.b.shape[2]:
                return found
            raise WeightsError(
                f"the adapter of {pair.module} is {list(pair.a.shape)} and {list(pair.b.shape)}, vLLM's slot "
                f"{list(found.a.shape[2:])} and {list(found.b.shape[2:])}"
            )
    raise WeightsError(f"vLLM has no slot for an adapter of {pair.module}; leave its layer out of lora.targets")
