"""A model's tensors as views of one flat vector with the layout of the published version: a swap is one copy.

published bytes ──copy──► flat [nbytes] ──xxh3 per chunk──► checksum of what the engine really holds
                           ├── view: parameter a
                           └── view: parameter b
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
import torch

from async_rl.errors import WeightsError
from async_rl.weights.manifest import Manifest, Tensor, chunk_checksums, combine, copy_checksum
from async_rl.weights.offer import blocks

_STAGE_BYTES = 64 << 20
"""Bytes per copy from host to device."""


class FlatWeights:
    """Loads versions into a model and proves what it then holds.

    Args:
        parameters: what is published, by name; they become views of the flat vector with the first version.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = dict(parameters)
        self._layout: tuple[Tensor, ...] = ()
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._chunks: tuple[int, ...] = ()

    def load(self, manifest: Manifest, data: memoryview) -> str:
        """Copy a version in; return the checksum of the engine's own memory.

        Raises:
            WeightsError: before anything is changed, if names, shapes, types or sizes are not those of the model.
        """
        if data.nbytes != manifest.nbytes:
            raise WeightsError(f"version {manifest.version}: {data.nbytes} bytes, the manifest says {manifest.nbytes}")
        self.fit(manifest)
        if self._flat.device.type == "cpu":
            held = memoryview(self._flat.numpy())
            self._chunks = tuple(
                copy_checksum(manifest.chunk(held, index), manifest.chunk(data, index))
                for index in range(len(manifest.chunks))
            )
            return combine(self._chunks)
        source = np.frombuffer(data, np.uint8)
        for start in range(0, manifest.nbytes, _STAGE_BYTES):
            part = source[start : start + _STAGE_BYTES].copy()
            self._flat[start : start + len(part)].copy_(torch.from_numpy(part))
        return self._hash(manifest)

    def fit(self, manifest: Manifest) -> None:
        """Give the tensors their places of this version.

        Raises:
            WeightsError: it is not of the model; nothing is changed.
        """
        if manifest.tensors != self._layout or self._flat.numel() != manifest.nbytes:
            check_layout(self._parameters, manifest)
            self._bind(manifest)

    def receive(self, manifest: Manifest, take: Callable[[torch.Tensor], None]) -> str:
        """As :meth:`load`, once it was made to :meth:`fit`; ``take`` writes each block where it belongs."""
        for begin, end in blocks(manifest.tensors, manifest.nbytes):
            take(self._flat[begin:end])
        return self._hash(manifest)

    def _hash(self, manifest: Manifest) -> str:
        self._chunks = chunk_checksums(memoryview(self._flat.cpu().numpy()), manifest.chunk_bytes)
        return combine(self._chunks)

    def differing(self, manifest: Manifest) -> list[str]:
        """Names of the tensors with bytes in chunks that are not as ``manifest`` says, after :meth:`load` of it."""
        size = manifest.chunk_bytes
        wrong = {i for i, (held, sent) in enumerate(zip(self._chunks, manifest.chunks, strict=True)) if held != sent}
        return [
            t.name
            for t in manifest.tensors
            if not wrong.isdisjoint(range(t.offset // size, -(-(t.offset + t.nbytes) // size)))
        ]

    def free(self) -> None:
        """Give the memory of all parameters back, keeping their shapes; the next :meth:`load` takes it again."""
        for parameter in self._parameters.values():
            parameter.data = parameter.new_empty(()).expand(parameter.shape)
        self._flat, self._layout = self._flat.new_empty(0), ()

    def _bind(self, manifest: Manifest) -> None:
        device = next(iter(self._parameters.values())).device
        self._flat = torch.empty(manifest.nbytes, dtype=torch.uint8, device=device)
        for tensor in manifest.tensors:
            parameter = self._parameters[tensor.name]
            part = self._flat[tensor.offset : tensor.offset + tensor.nbytes]
            parameter.data = part.view(parameter.dtype).view(tensor.shape)
        self._layout = manifest.tensors


def check_layout(parameters: Mapping[str, torch.Tensor], manifest: Manifest) -> None:
    """Check that a version fits a model.

    Raises:
        WeightsError: names what is missing, what is extra, what overlaps, or what has another shape, type or a crooked
            offset.
    """
    published = {t.name: t for t in manifest.tensors}
    missing, extra = sorted(parameters.keys() - published.keys()), sorted(published.keys() - parameters.keys())
    if missing or extra:
        raise WeightsError(
            f"version {manifest.version} is not of this model: it lacks {missing[:5] or 'nothing'}, "
            f"it has {extra[:5] or 'nothing'} that the model does not; use the same model.path and lora on both sides"
        )
    if len(published) != len(manifest.tensors):
        raise WeightsError(f"version {manifest.version} names a tensor twice")
    for name, parameter in parameters.items():
        tensor = published[name]
        dtype = str(parameter.dtype).removeprefix("torch.")
        if tensor.shape != tuple(parameter.shape) or tensor.dtype != dtype:
            raise WeightsError(
                f"version {manifest.version}: {name} is {tensor.dtype} {list(tensor.shape)}, the engine's model has "
                f"{dtype} {list(parameter.shape)}"
            )
        if tensor.offset % parameter.element_size():
            raise WeightsError(f"version {manifest.version}: {name} starts at byte {tensor.offset}, inside an element")
    for before, after in pairwise(sorted(manifest.tensors, key=lambda t: t.offset)):
        if after.offset < before.offset + before.nbytes:
            raise WeightsError(f"version {manifest.version}: {after.name} overlaps {before.name}")
