"""What a version of the weights is made of: tensors in one flat buffer, and a checksum per chunk as proof.

    flat bytes │ tensor a │ tensor b │ ...      chunks of ``chunk_bytes``, xxh3-64 each

The manifest's ``checksum`` covers the checksums of all chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from async_rl.errors import WeightsError

MAX_TENSORS = 100_000
MAX_DIMENSIONS = 32
CACHED_BYTES = 256 << 10
"""What is copied in parts of this size can be hashed before it has left the cache."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named tensor in the flat buffer."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """``float32`` or ``bfloat16``."""
    shape: tuple[int, ...]
    offset: int
    """First byte in the flat buffer."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * (4 if self.dtype == "float32" else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A published version."""

    version: int
    """Number of learner steps made; 0 is the start."""
    run_id: str
    """The run that published it."""
    tensors: tuple[Tensor, ...]
    nbytes: int
    chunk_bytes: int
    chunks: tuple[int, ...]
    """xxh3-64 of each chunk."""
    checksum: str
    """Hex xxh3-128 over ``chunks``: two equal checksums mean equal bytes."""
    segment: str
    """Path of the shared-memory segment on the learner's host."""
    host: str
    """Identity of the learner's host, see :func:`async_rl.process.host_id`."""
    epoch: int = 0
    """How often the run had gone back to an earlier step when it was published."""

    @property
    def order(self) -> tuple[int, int]:
        """Rises with every version that is published, although a version's number may come again."""
        return self.epoch, self.version

    def to_wire(self) -> dict[str, Any]:
        """As plain types."""
        fields = {k: getattr(self, k) for k in self.__slots__}
        fields["tensors"] = [[t.name, t.dtype, list(t.shape), t.offset] for t in self.tensors]
        fields["chunks"] = np.asarray(self.chunks, "<u8").tobytes()
        return fields

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Manifest:
        """From :meth:`to_wire`.

        Raises:
            WeightsError: anything missing, of the wrong type, or inconsistent.
        """
        try:
            manifest = cls(
                version=int(fields["version"]),
                run_id=str(fields["run_id"]),
                tensors=tuple(Tensor(str(n), str(d), tuple(map(int, s)), int(o)) for n, d, s, o in fields["tensors"]),
                nbytes=int(fields["nbytes"]),
                chunk_bytes=int(fields["chunk_bytes"]),
                chunks=tuple(int(c) for c in np.frombuffer(fields["chunks"], "<u8")),
                checksum=str(fields["checksum"]),
                segment=str(fields["segment"]),
                host=str(fields["host"]),
                epoch=int(fields.get("epoch", 0)),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise WeightsError(f"malformed manifest: {error!r}") from None
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise :class:`WeightsError` unless tensors lie inside the buffer and the chunks cover it."""
        if len(self.tensors) > MAX_TENSORS or self.chunk_bytes < 1 or self.nbytes < 0:
            raise WeightsError("manifest: impossible sizes")
        if self.version < 0 or self.epoch < 0:
            raise WeightsError(f"manifest: impossible version {self.version} of epoch {self.epoch}")
        if len(self.chunks) != -(-self.nbytes // self.chunk_bytes):
            raise WeightsError(f"manifest: {len(self.chunks)} chunks do not cover {self.nbytes} bytes")
        for t in self.tensors:
            if t.dtype not in ("float32", "bfloat16") or len(t.shape) > MAX_DIMENSIONS or min(t.shape, default=0) < 0:
                raise WeightsError(f"manifest: tensor {t.name} is {t.dtype} {t.shape}")
            if t.offset < 0 or t.offset + t.nbytes > self.nbytes:
                raise WeightsError(f"manifest: tensor {t.name} lies outside the buffer")
        if combine(self.chunks) != self.checksum:
            raise WeightsError("manifest: the checksum does not cover the chunks")

    def chunk(self, data: memoryview, index: int) -> memoryview:
        """The bytes of chunk ``index``."""
        return data[index * self.chunk_bytes : min((index + 1) * self.chunk_bytes, self.nbytes)]

    def verify(self, data: memoryview) -> None:
        """Raise :class:`WeightsError` naming the first chunk whose bytes are not those published."""
        if data.nbytes != self.nbytes:
            raise WeightsError(f"version {self.version}: {data.nbytes} bytes, the manifest says {self.nbytes}")
        for index, expected in enumerate(self.chunks):
            if xxhash.xxh3_64_intdigest(self.chunk(data, index)) != expected:
                where = [t.name for t in self.tensors if t.offset < (index + 1) * self.chunk_bytes]
                raise WeightsError(
                    f"version {self.version}: chunk {index} (up to {where[-1:]}) is not what was published"
                )


def combine(chunks: Sequence[int]) -> str:
    """Checksum over per-chunk checksums."""
    return str(xxhash.xxh3_128_hexdigest(np.asarray(chunks, "<u8").tobytes()))


def chunk_checksums(data: memoryview, chunk_bytes: int) -> tuple[int, ...]:
    """xxh3-64 of each chunk of ``data`` (bytes)."""
    return tuple(xxhash.xxh3_64_intdigest(data[i : i + chunk_bytes]) for i in range(0, data.nbytes, chunk_bytes))


def copy_checksum(target: memoryview, source: memoryview) -> int:
    """Copy a chunk of bytes; the xxh3-64 of what the target then holds."""
    state = xxhash.xxh3_64()
    for first in range(0, source.nbytes, CACHED_BYTES):
        part = target[first : first + CACHED_BYTES]
        part[:] = source[first : first + CACHED_BYTES]
        state.update(part)
    return state.intdigest()
