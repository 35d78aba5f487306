"""The embedded engine's weights in a run with an adapter: the base from its folder, A and B from each version.

published bytes ──copy──► A, B of each layer ──xxh3──► checksum of what is held
                            ├─ float32   W = base + α/r B A, in the layer itself; proven with a vector through it
                            └─ bfloat16  y = W x + B (A x) α/r, as the learner computes it

A merge in bfloat16 would lose what training does: a change below half a unit in the last place of W is rounded away.
In float32 that is no loss, and a merged layer costs what a plain one does.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn.functional import linear

from actors.engines.flat_weights import FlatWeights
from async_rl.adapter import names_of
from async_rl.config import LoraConfig
from async_rl.weights.manifest import Manifest

FAULTY = "a faulty merge"
"""Stands in place of a checksum: the bytes are right, but not what a layer computes with them."""
_TOLERANCE = 1e-4


class AdapterWeights:
    """Loads versions of an adapter into a model and proves them, as :class:`actors.engines.flat_weights.FlatWeights`.

    Args:
        model: with the weights of the base.
        lora: rank, scale and target layers.
    """

    def __init__(self, model: nn.Module, lora: LoraConfig) -> None:
        targets = tuple(f".{target}" for target in lora.targets)
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if f".{name}".endswith(targets) and isinstance(module, nn.Linear)
        }
        self._scale = lora.scale
        self._merges = next(model.parameters()).dtype == torch.float32
        self._base = {name: layer.weight.data.clone() for name, layer in self._layers.items()} if self._merges else {}
        self._factors = {
            name: (
                layer.weight.new_zeros(lora.rank, layer.in_features),
                layer.weight.new_zeros(layer.out_features, lora.rank),
            )
            for name, layer in self._layers.items()
        }
        if not self._merges:
            for name, layer in self._layers.items():
                layer.forward = partial(_adapted, layer, *self._factors[name], self._scale)
        self._flat = FlatWeights({name: t for key, two in self._factors.items() for name, t in _named(key, two)})
        self._kept = [*model.parameters(), *self._base.values()]
        self._away: list[torch.Tensor] = []
        self._wrong: list[str] = []

    def load(self, manifest: Manifest, data: memoryview) -> str:
        """Copy a version in; return the checksum of the adapter's bytes that are held, or :data:`FAULTY`.

        Raises:
            WeightsError: before anything is changed, if it is not of this adapter.
        """
        checksum = self._flat.load(manifest, data)
        if checksum != manifest.checksum:
            return checksum
        self._fetch()
        self._wrong = [name for name in self._base if not self._merge(name)]
        return FAULTY if self._wrong else checksum

    def differing(self, manifest: Manifest) -> list[str]:
        """Names of tensors, or of merged layers, that are not as they should be after :meth:`load` of ``manifest``."""
        return self._flat.differing(manifest) or self._wrong

    def free(self) -> None:
        """Give the device's memory back; the base, which no version brings, waits on the host."""
        self._flat.free()
        if not self._away and self._kept[0].device.type != "cpu":
            self._away = [tensor.data.cpu() for tensor in self._kept]
            for tensor in self._kept:
                tensor.data = tensor.new_empty(()).expand(tensor.shape)

    def _fetch(self) -> None:
        for tensor, host in zip(self._kept, self._away, strict=False):  # nothing is away, or all of it
            tensor.data = host.to(tensor.device)
        self._away = []

    @torch.no_grad()
    def _merge(self, name: str) -> bool:
        """Give a layer its weight; whether it computes what base and adapter do one after the other."""
        (a, b), base, weight = self._factors[name], self._base[name], self._layers[name].weight.data
        torch.addmm(base, b, a, alpha=self._scale, out=weight)
        probe = torch.arange(base.shape[1], device=base.device).cos()
        expected = linear(probe, base) + linear(linear(probe, a), b) * self._scale
        difference = float((linear(probe, weight) - expected).abs().max())
        return difference <= _TOLERANCE * max(1.0, float(expected.abs().max()))  # not-a-number is no agreement


def _named(layer: str, factors: tuple[torch.Tensor, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return list(zip(names_of(layer), factors, strict=True))


def _adapted(layer: nn.Linear, a: torch.Tensor, b: torch.Tensor, scale: float, inputs: torch.Tensor) -> torch.Tensor:
    """The layer with its adapter beside it, in the order in which peft computes."""
    return linear(inputs, layer.weight, layer.bias) + linear(linear(inputs, a), b) * scale
