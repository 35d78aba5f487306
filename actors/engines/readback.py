"""Load a published version into a model with fused parameters, and prove what it then holds by its checksum.

published  q_proj ──┐  vLLM's own loader writes                                           held
           k_proj ──┼──► qkv_proj  held ── rows of q, k, v in published order ──xxh3──►  checksum == published?
           v_proj ──┘  :func:`locate` finds the rows by itself: a fault of either shows as a difference

The proof reads the engine's own memory once and nothing else, so that it holds whatever happens to the segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import xxhash

from async_rl.errors import WeightsError
from async_rl.weights.manifest import Manifest, Tensor, combine

Places = Mapping[str, tuple[str, int]]
"""For each published tensor the parameter that holds it, and its first row there."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STAGE_BYTES = 64 << 20
"""Bytes per copy from device to host."""


def tensors(manifest: Manifest, data: memoryview) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, tensor)`` of everything published, as views of ``data``."""
    flat = torch.frombuffer(data, dtype=torch.uint8)
    for t in manifest.tensors:
        yield t.name, _view(flat[t.offset :], t)


def place(model: Any, manifest: Manifest, padded: frozenset[str]) -> Places:
    """Find where the model holds each published tensor; nothing is changed.

    Args:
        model: vLLM's model.
        manifest: what was published.
        padded: parameters that may have more rows than their published tensor.

    Raises:
        WeightsError: naming a tensor that has no place, another shape or a wider type, or overlaps another one, or a
            parameter that was not published.
    """
    held = dict(model.named_parameters(remove_duplicate=False))
    shapes = {t.name: t.shape for t in manifest.tensors}
    dtypes = {t.name: _DTYPES[t.dtype] for t in manifest.tensors}
    fused = getattr(model, "packed_modules_mapping", {})
    if scalars := [name for name, shape in shapes.items() if not shape]:
        raise WeightsError(f"version {manifest.version}: {scalars[0]} has no rows")
    for before, after in pairwise(_in_order(manifest)):
        if after.offset < before.offset + before.nbytes or after.name == before.name:
            raise WeightsError(f"version {manifest.version}: {after.name} overlaps {before.name}")
    places = {name: locate(name, held, shapes, fused) for name in shapes}
    rows: dict[int, int] = {}
    for name, (owner, start) in places.items():
        whole, shape = held[owner], shapes[name]
        if whole.element_size() < dtypes[name].itemsize:
            raise WeightsError(
                f"version {manifest.version}: {name} is {dtypes[name]}, {owner} holds only {whole.dtype}"
            )
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
    _load(model, manifest, tensors(manifest, data))


def load_block(model: Any, manifest: Manifest, block: torch.Tensor, begin: int) -> None:
    """The same for the tensors of one block of the flat bytes.

    Args:
        model: vLLM's model.
        manifest: what was published.
        block: uint8, on any device, with whole tensors.
        begin: its first byte in the flat bytes.

    Raises:
        WeightsError: the model refuses them.
    """
    inside = (t for t in manifest.tensors if begin <= t.offset < begin + block.numel())
    _load(model, manifest, ((t.name, _view(block[t.offset - begin :], t)) for t in inside))


def _view(data: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    """The tensor with which these bytes begin."""
    return data[: tensor.nbytes].view(_DTYPES[tensor.dtype]).view(tensor.shape)


def _load(model: Any, manifest: Manifest, named: Iterator[tuple[str, torch.Tensor]]) -> None:
    try:
        model.load_weights(named)
    except Exception as error:  # a boundary: vLLM's loaders raise anything
        raise WeightsError(f"version {manifest.version}: vLLM does not take it: {error!r}") from error


def prove(model: Any, manifest: Manifest, data: memoryview, places: Places) -> str:
    """Compute the checksum of all that the model holds, in the order and the chunks of what was published.

    Args:
        model: vLLM's model.
        manifest: what was published.
        data: the published bytes; read only between tensors, and to say what differs.
        places: from :func:`place`.

    Returns:
        The checksum of the bytes held; it is that of the manifest.

    Raises:
        WeightsError: it is not, naming the first chunk that differs and its tensors.
    """
    chunks = _hash(model, manifest, places, lambda begin, end: data[begin:end])
    for index, (held, published) in enumerate(zip(chunks, manifest.chunks, strict=True)):
        if held != published:
            raise WeightsError(_difference(model, manifest, data, places, index))
    return combine(chunks)


def prove_alone(model: Any, manifest: Manifest, places: Places) -> str:
    """The same where the published bytes are not at hand; what lies between tensors is zero.

    Raises:
        WeightsError: it holds something else, naming the tensors of the first chunk that differs.
    """
    chunks = _hash(model, manifest, places, lambda begin, end: memoryview(bytes(max(0, end - begin))))
    for index, (held, published) in enumerate(zip(chunks, manifest.chunks, strict=True)):
        if held != published:
            names = ", ".join(t.name for t in _inside(manifest, index))
            raise WeightsError(
                f"version {manifest.version}: the engine does not hold {names} as it was published (chunk {index})"
            )
    return combine(chunks)


def _hash(model: Any, manifest: Manifest, places: Places, between: Callable[[int, int], memoryview]) -> list[int]:
    """Checksums by chunk of what the model holds.

    Args:
        model: vLLM's model.
        manifest: what was published.
        places: from :func:`place`.
        between: gives the bytes that are in no tensor, from one place to another.
    """
    hasher = _ChunkHasher(manifest.chunk_bytes)
    position = 0
    for tensor in _in_order(manifest):
        hasher.update(between(position, tensor.offset))
        for part in _host_bytes(_held(model, tensor, places)):
            hasher.update(part)
        position = tensor.offset + tensor.nbytes
    hasher.update(between(position, manifest.nbytes))
    return hasher.finish()


class _ChunkHasher:
    """xxh3-64 of each chunk of a stream."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = self._room = chunk_bytes
        self._hash = xxhash.xxh3_64()
        self._digests: list[int] = []

    def update(self, data: memoryview) -> None:
        while data.nbytes:
            part = data[: self._room]
            self._hash.update(part)
            self._room -= part.nbytes
            data = data[part.nbytes :]
            if not self._room:
                self._close()

    def finish(self) -> list[int]:
        if self._room < self._chunk_bytes:
            self._close()
        return self._digests

    def _close(self) -> None:
        self._digests.append(self._hash.intdigest())
        self._hash.reset()
        self._room = self._chunk_bytes


def _in_order(manifest: Manifest) -> list[Tensor]:
    return sorted(manifest.tensors, key=lambda t: t.offset)


def _held(model: Any, tensor: Tensor, places: Places) -> torch.Tensor:
    """The model's own memory of a published tensor, in the published dtype (the same memory if that is the model's)."""
    owner, start = places[tensor.name]
    rows: torch.Tensor = model.get_parameter(owner).data[start : start + tensor.shape[0]]
    return rows.to(_DTYPES[tensor.dtype])


def _host_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor on any device; each part is valid until the next one is asked for."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        yield memoryview(flat.numpy())
        return
    stage = torch.empty(min(_STAGE_BYTES, flat.numel()), dtype=torch.uint8, pin_memory=True)  # cached by torch
    for part in flat.split(_STAGE_BYTES):
        yield memoryview(stage[: part.numel()].copy_(part).numpy())


def _inside(manifest: Manifest, index: int) -> list[Tensor]:
    """The tensors that have bytes in a chunk."""
    begin, end = index * manifest.chunk_bytes, (index + 1) * manifest.chunk_bytes
    return [t for t in _in_order(manifest) if t.offset < end and t.offset + t.nbytes > begin]


def _difference(model: Any, manifest: Manifest, data: memoryview, places: Places, index: int) -> str:
    """A sentence about a chunk whose held bytes are not those that were published."""
    inside = _inside(manifest, index)
    names = ", ".join(t.name for t in inside)
    if xxhash.xxh3_64_intdigest(manifest.chunk(data, index)) != manifest.chunks[index]:
        return f"version {manifest.version}: chunk {index} ({names}) was overwritten while it was loaded"
    for tensor in inside:
        held = b"".join(_host_bytes(_held(model, tensor, places)))
        if held != data[tensor.offset : tensor.offset + tensor.nbytes]:
            names = tensor.name
            break
    return f"version {manifest.version}: the engine does not hold {names} as it was published (chunk {index})"
