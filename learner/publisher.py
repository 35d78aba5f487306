"""Publishes versions of the weights: one copy of the flat vector into a shared-memory slot, and a manifest as proof.

    flat vector (any device, float32) ──copy, cast──► slot version % 2, or "eval" ──xxh3 per chunk──► Manifest

Each part is hashed right after it was copied, while it is still in the cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Literal

import torch
import xxhash

from async_rl.errors import ConfigError, WeightsError
from async_rl.process import host_id
from async_rl.weights.manifest import CACHED_BYTES, Manifest, Tensor, combine, copy_checksum
from async_rl.weights.segment import SLOTS, Segment

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
        began = time.perf_counter()
        segment = self._segments["eval" if evaluated else str(version % 2)]
        chunks = self._copy(flat.detach()[: self._numel], segment.data)
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

    def _copy(self, source: torch.Tensor, data: memoryview) -> tuple[int, ...]:
        size = self._chunk_bytes
        if source.device.type == "cpu" and source.dtype == self._dtype:  # a fifth faster than torch's copies
            new = memoryview(source.contiguous().numpy()).cast("B")
            return tuple(copy_checksum(data[i : i + size], new[i : i + size]) for i in range(0, self.nbytes, size))
        return tuple(
            self._cast_chunk(part, data[i * size : (i + 1) * size])
            for i, part in enumerate(source.split(size // self._dtype.itemsize))
        )

    def _cast_chunk(self, source: torch.Tensor, data: memoryview) -> int:
        """Copy what is of another type or on another device; the checksum of ``data``."""
        # a copy from a device is a call of its own: one large one
        most = CACHED_BYTES // self._dtype.itemsize if source.device.type == "cpu" else source.numel()
        state, target = xxhash.xxh3_64(), torch.frombuffer(data, dtype=self._dtype)
        for first in range(0, source.numel(), most):
            # from CUDA this waits for the bytes: the target is pageable
            target[first : first + most].copy_(source[first : first + most])
            state.update(data[first * self._dtype.itemsize : (first + most) * self._dtype.itemsize])
        return state.intdigest()


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
