"""Load a published version into a model with fused parameters, and compare what it then holds, tensor by tensor.

published  q_proj ──┐  vLLM's own loader writes
           k_proj ──┼──► qkv_proj  held
           v_proj ──┘  :func:`locate` finds the rows by itself: a fault of either shows as a difference
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from async_rl.errors import WeightsError
from async_rl.weights.manifest import Manifest

Places = Mapping[str, tuple[str, int]]
"""For each published tensor the parameter that holds it, and its first row there."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors(manifest: Manifest, data: memoryview) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, tensor)`` of everything published, as views of ``data``."""
    flat = torch.frombuffer(data, dtype=torch.uint8)
    for t in manifest.tensors:
        yield t.name, flat[t.offset : t.offset + t.nbytes].view(_DTYPES[t.dtype]).view(t.shape)


def place(model: Any, manifest: Manifest, padded: frozenset[str]) -> Places:
    """Find where the model holds each published tensor; nothing is changed.

    Args:
        model: vLLM's model.
        manifest: what was published.
        padded: parameters that may have more rows than their published tensor.

    Raises:
        WeightsError: naming a tensor that has no place or another shape, or a parameter that was not published.
    """
    held = dict(model.named_parameters(remove_duplicate=False))
    shapes = {t.name: t.shape for t in manifest.tensors}
    fused = getattr(model, "packed_modules_mapping", {})
    if scalars := [name for name, shape in shapes.items() if not shape]:
        raise WeightsError(f"version {manifest.version}: {scalars[0]} has no rows")
    places = {name: locate(name, held, shapes, fused) for name in shapes}
    rows: dict[int, int] = {}
    for name, (owner, start) in places.items():
        whole, shape = held[owner], shapes[name]
        if whole[start : start + shape[0]].shape != shape:
            raise WeightsError(f"version {manifest.version}: {name} is {shape}, {owner} is {tuple(whole.shape)}")
        rows[id(whole)] = whole.shape[0] if owner in padded else rows.get(id(whole), 0) + shape[0]
    for owner, whole in held.items():
        if rows.get(id(whole)) != whole.shape[0]:
            raise WeightsError(f"version {manifest.version}: {rows.get(id(whole), 0)} rows of {owner} were published")
    return places


def locate(
    name: str, held: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], fused: Mapping[str, list[str]]
) -> tuple[str, int]:
    """Which parameter holds a published tensor, and from which row.

    Args:
        name: of the published tensor.
        held: the model's parameters by name.
        shapes: shapes of all published tensors by name.
        fused: for each fused module the modules that it holds, in order of rows.

    Returns:
        Name of the parameter, and the row.

    Raises:
        WeightsError: nowhere.
    """
    if name in held:
        return name, 0
    path, _, leaf = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    for whole, parts in fused.items():
        owner = f"{parent}.{whole}.{leaf}"
        if module in parts and owner in held:
            before = [f"{parent}.{part}.{leaf}" for part in parts[: parts.index(module)]]
            if all(b in shapes for b in before):
                return owner, sum(shapes[b][0] for b in before)
    raise WeightsError(f"{name} was published, but no parameter of the engine's model holds it")


def load(model: Any, manifest: Manifest, data: memoryview) -> None:
    """Write all tensors with the model's own ``load_weights``.

    Raises:
        WeightsError: the model refuses them; some may have been written.
    """
    try:
        model.load_weights(tensors(manifest, data))
    except Exception as error:  # a boundary: vLLM's loaders raise anything
        raise WeightsError(f"version {manifest.version}: vLLM does not take it: {error!r}") from error


def compare(model: Any, manifest: Manifest, data: memoryview, places: Places) -> None:
    """Compare the bits of all that the model holds with what was published, rounded to the model's dtype.

    Raises:
        WeightsError: naming a tensor that differs.
    """
    held = dict(model.named_parameters(remove_duplicate=False))
    for name, expected in tensors(manifest, data):
        owner, start = places[name]
        view = held[owner].data[start : start + expected.shape[0]]
        if not torch.equal(_bits(view), _bits(expected.to(view.device, view.dtype))):
            raise WeightsError(f"version {manifest.version}: the engine does not hold {name} as it was published")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()])
