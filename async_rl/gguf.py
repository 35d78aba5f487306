"""Reads GGUF files: metadata, and the tensors as float32, for the few tensor types that we meet.

    "GGUF" │ version │ counts │ key-value pairs │ tensor infos │ padding │ tensor data

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3, little-endian).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rl.errors import AsyncRLError

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GGUF:
    """A file's content."""

    metadata: dict[str, Any]
    tensors: dict[str, Floats]
    """float32 [out, in] or [n]: GGUF lists dimensions fastest first, these are in numpy's order."""


def read_gguf(path: Path) -> GGUF:
    """Read a whole file and dequantise its tensors.

    Raises:
        AsyncRLError: not a GGUF file of version 3, cut short, or with a tensor type that is not supported.
    """
    data = np.fromfile(path, np.uint8)
    cursor = _Cursor(data)
    try:
        if bytes(data[:4]) != b"GGUF" or cursor.skip(4).scalar("I") != 3:
            raise AsyncRLError(f"{path} is not a GGUF file of version 3")
        num_tensors, num_pairs = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_pairs)}
        infos = [_info(cursor) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        start = math.ceil(cursor.at / alignment) * alignment
        tensors = {name: _tensor(data, shape, kind, start + offset) for name, shape, kind, offset in infos}
    except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
        raise AsyncRLError(f"{path} is damaged, or uses a GGUF feature that is not supported: {error!r}") from None
    return GGUF(metadata, tensors)


class _Cursor:
    def __init__(self, data: Bytes) -> None:
        self._data = data.data
        self.at = 0

    def skip(self, count: int) -> _Cursor:
        self.at += count
        return self

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self.at += length
        return bytes(self._data[self.at - length : self.at]).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            return [self.value(inner) for _ in range(count)]
        return self.scalar(_SCALARS[kind])


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dimensions = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
    return name, tuple(reversed(dimensions)), cursor.scalar("I"), cursor.scalar("Q")


def _tensor(data: Bytes, shape: tuple[int, ...], kind: int, start: int) -> Floats:
    block_values, block_bytes, decode = _KINDS[kind]
    count, remainder = divmod(math.prod(shape), block_values)
    if remainder:
        raise ValueError(f"{shape} is no whole number of blocks of {block_values}")
    blocks = data[start : start + count * block_bytes].reshape(count, block_bytes)
    return decode(blocks).reshape(shape)


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _q8_0(blocks: Bytes) -> Floats:
    """``w = d · q``: float16 scale, 32 signed bytes."""
    return _f16(blocks[:, :2]) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)


def _q4_1(blocks: Bytes) -> Floats:
    """``w = d · q + m``: float16 scale and minimum; 16 bytes whose low halves are the first 16 values."""
    scale, minimum, packed = _f16(blocks[:, :2]), _f16(blocks[:, 2:4]), blocks[:, 4:]
    values: Floats = scale * np.concatenate([packed & 15, packed >> 4], axis=1) + minimum
    return values


_KINDS: dict[int, tuple[int, int, Callable[[Bytes], Floats]]] = {
    0: (1, 4, _f32),
    1: (1, 2, _f16),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
}
"""GGML type → (values per block, bytes per block, decoder of [blocks, bytes])."""
