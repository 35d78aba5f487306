"""Publishes versions of the weights: one copy of the flat vector into a shared-memory slot, and a manifest as proof.

    flat vector, whole or piece by piece ──copy, cast──► slot version % 2, or "eval" ──xxh3 per chunk──► Manifest

Each part is hashed right after it was copied, while it is still in the cache. What lies in pieces on several devices is
never held whole but in the slot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
import xxhash

from async_rl.errors import ConfigError, WeightsError
from async_rl.process import host_id
from async_rl.weights.manifest import CACHED_BYTES, Manifest, Tensor, combine
from async_rl.weights.segment import SLOTS, Segment
from learner.parameters import Piece

Layout = Sequence[tuple[str, tuple[int, ...], int, int]]
"""(name, shape, first element in the flat vector, number of elements) of each tensor, as ``FlatParameters.layout``."""


class Publisher:
    """Owner of a run's segments; lives on rank 0.

    Args:
        run_id: names the segments.
        tensors: where each tensor lies in the flat vector. What lies behind the last one is not published.
        chunk_bytes: bytes per checksum, a multiple of 4.
        dtype: type of the published tensors; master weights are cast during the copy.
        epoch: of the versions, see :attr:`async_rl.weights.manifest.Manifest.epoch`.

    Raises:
        ConfigError: ``chunk_bytes`` would split an element.
        WeightsError: ``/dev/shm`` cannot hold three versions.
    """

    def __init__(
        self,
        run_id: str,
        tensors: Layout,
        chunk_bytes: int,
        dtype: Literal["float32", "bfloat16"] = "float32",
        epoch: int = 0,
    ) -> None:
        if chunk_bytes < 4 or chunk_bytes % 4:
            raise ConfigError(
                f"weights.chunk_bytes = {chunk_bytes}: make it a multiple of 4, so that no element is split"
            )
        self._dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        size = self._dtype.itemsize
        for name, shape, _, numel in tensors:
            if math.prod(shape) != numel:
                raise ValueError(f"layout: {name} {shape} does not have {numel} elements")
        self._run_id, self._epoch = run_id, epoch
        self._chunk_bytes = chunk_bytes
        self._tensors = tuple(Tensor(name, dtype, tuple(shape), first * size) for name, shape, first, _ in tensors)
        self._numel = max((first + numel for _, _, first, numel in tensors), default=0)
        self._host = host_id()
        self.nbytes = self._numel * size
        """Bytes of a version."""
        self._segments = _allocate(run_id, self.nbytes)
        self.publish_s = 0.0
        """Seconds that the last :meth:`publish` took."""

    def publish(self, flat: torch.Tensor, version: int, evaluated: bool) -> Manifest:
        """Copy a version into its slot; on return it can be read by anybody who has the manifest.

        Args:
            flat: float32 [num_flat] on any device, at least as long as the layout.
            version: learner steps made.
            evaluated: put it into the slot that keeps it until the next evaluated version.
        """
        if flat.ndim != 1 or flat.dtype != torch.float32 or flat.numel() < self._numel:
            raise ValueError(f"flat must be float32 [>= {self._numel}], got {flat.dtype} {tuple(flat.shape)}")
        return self.publish_pieces([(0, flat)], version, evaluated)

    def publish_pieces(self, pieces: Iterable[Piece], version: int, evaluated: bool) -> Manifest:
        """The same from parts of the vector, in ascending order, each read before the next one is asked for.

        Args:
            pieces: float32 or the published type, on any device; what lies between two of them is zero. What lies
                behind the last published tensor is not read.
            version: learner steps made.
            evaluated: as for :meth:`publish`.
        """
        began = time.perf_counter()
        segment = self._segments["eval" if evaluated else str(version % 2)]
        filling = _Filling(segment.data, self._chunk_bytes, self._dtype)
        for first, values in pieces:
            if first < self._numel:
                filling.add(first, values.detach().flatten()[: self._numel - first])
        chunks = filling.finish()
        self.publish_s = time.perf_counter() - began
        return Manifest(
            version=version,
            run_id=self._run_id,
            tensors=self._tensors,
            nbytes=self.nbytes,
            chunk_bytes=self._chunk_bytes,
            chunks=chunks,
            checksum=combine(chunks),
            segment=str(segment.path),
            host=self._host,
            epoch=self._epoch,
        )

    def close(self) -> None:
        """Unlink the segments; readers that have them mapped keep their bytes."""
        for segment in self._segments.values():
            segment.unlink()
        self._segments.clear()


class _Filling:
    """Fills a slot from its beginning on, and hashes behind.

    Args:
        data: the slot, ``[nbytes]``; where nothing is written, it is zero already.
        chunk_bytes: bytes per checksum.
        dtype: of the slot.
    """

    def __init__(self, data: memoryview, chunk_bytes: int, dtype: torch.dtype) -> None:
        self._data = data
        self._chunk_bytes = chunk_bytes
        self._dtype = dtype
        self._target = torch.frombuffer(data, dtype=dtype) if data.nbytes else torch.empty(0, dtype=dtype)
        self._hashed = 0
        self._state = xxhash.xxh3_64()
        self._chunks: list[int] = []

    def add(self, first: int, source: torch.Tensor) -> None:
        """Copy elements ``[count]`` to where they belong, behind all that was copied before."""
        size = self._dtype.itemsize
        on_cpu = source.device.type == "cpu"
        is_plain = on_cpu and source.dtype == self._dtype
        plain = memoryview(source.contiguous().view(torch.uint8).numpy()) if is_plain else None
        begin, place = first * size, 0
        self._hash_to(begin)
        while place < source.numel():
            at = begin + place * size
            # small parts are hashed from the cache; a copy from a device is a call of its own: large ones
            most = min(self._chunk_bytes - at % self._chunk_bytes, CACHED_BYTES if on_cpu else self._chunk_bytes)
            count = min(most // size, source.numel() - place)
            if plain is not None:  # a fifth faster than torch's copies
                self._data[at : at + count * size] = plain[place * size : (place + count) * size]
            else:  # from CUDA this waits for the bytes: the target is pageable
                self._target[at // size : at // size + count].copy_(source[place : place + count])
            place += count
            self._hash_to(at + count * size)

    def finish(self) -> tuple[int, ...]:
        """Hash to the end; the checksums of all chunks."""
        self._hash_to(self._data.nbytes)
        if self._hashed % self._chunk_bytes:
            self._chunks.append(self._state.intdigest())
        return tuple(self._chunks)

    def _hash_to(self, stop: int) -> None:
        while self._hashed < stop:
            end = min(stop, self._hashed - self._hashed % self._chunk_bytes + self._chunk_bytes)
            self._state.update(self._data[self._hashed : end])
            self._hashed = end
            if end % self._chunk_bytes == 0:
                self._chunks.append(self._state.intdigest())
                self._state.reset()


def _allocate(run_id: str, nbytes: int) -> dict[str, Segment]:
    """All slots at once: a host that is too small is found at the start, and no step pays for first-touched pages."""
    segments: dict[str, Segment] = {}
    try:
        for slot in SLOTS:
            segments[slot] = Segment(run_id, slot, nbytes)
    except WeightsError:
        for segment in segments.values():
            segment.unlink()
        raise
    return segments
