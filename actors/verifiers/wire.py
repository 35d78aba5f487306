"""Messages between a verifier pool and its children: a 4-byte length, then msgpack. No pickle in either direction."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgpack

_LENGTH = struct.Struct(">I")
_BIG_INTEGER = 1
"""msgpack extension: a whole number beyond 64 bits, as JSON may hold, in decimal digits."""


def pack(message: Any) -> bytes:
    """Frame one message of plain values.

    Raises:
        TypeError: it holds something that msgpack has no type for.
    """
    body: bytes = msgpack.packb(message, default=_extend, unicode_errors="surrogatepass")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Turns received bytes, in whatever pieces they come, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add ``data`` and yield each message that is complete."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield msgpack.unpackb(body, ext_hook=_restore, unicode_errors="surrogatepass", strict_map_key=False)


def _extend(value: Any) -> Any:
    if isinstance(value, int):
        return msgpack.ExtType(_BIG_INTEGER, str(value).encode())
    raise TypeError(f"a column holds {type(value).__name__}, which is no plain value")


def _restore(code: int, data: bytes) -> Any:
    if code == _BIG_INTEGER:
        return int(data)
    raise ValueError(f"unknown extension {code}")
