"""The header of a message: a msgpack map of plain types with a text ``type``, and what a receiver accepts at most."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from async_rl.errors import WireError

SCHEMA_VERSION = 2
Frame = bytes | memoryview
Header = dict[str, Any]

_NO_CONTAINERS = bytes({*range(256)} - {*range(0x80, 0xA0), *range(0xDC, 0xE0)})
"""Bytes that begin no list and no map."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a receiver accepts at most."""

    header_bytes: int = 16 << 20
    frame_bytes: int = 1 << 30
    groups: int = 65_536
    trajectories: int = 65_536
    arrays: int = 64
    depth: int = 32
    """Nesting of a header: what is deeper would overflow the stack of whoever prints or writes it."""
    containers: int = 1 << 18
    """Lists and maps in a header, and arrays in a message: an empty one is one byte on the wire, and more than fifty in
    memory. The manifest of 100,000 tensors has fewer."""
    meta_bytes: int = 1 << 20
    """A group's ``meta``: whoever gets several groups in one message could not read their header otherwise."""


LIMITS = Limits()


class _Packer(threading.local):
    """One for each thread: to make one costs more than to pack a header."""

    def __init__(self) -> None:
        self.pack = msgpack.Packer(use_bin_type=True).pack


_PACKER = _Packer()


def pack_header(header: Mapping[str, Any] | Sequence[Any]) -> bytes:
    """Serialise a header, or a part of one, of plain types."""
    packed: bytes = _PACKER.pack(header)
    return packed


def unpack_header(frame: Frame, limits: Limits = LIMITS) -> Header:
    """Parse a header.

    Raises:
        WireError: ``header_too_large``, ``too_many_containers``, ``bad_msgpack``, ``too_deep``, or ``bad_header`` (not
            a map with a text ``type``).
    """
    if len(frame) > limits.header_bytes:
        raise WireError("header_too_large", f"{len(frame)} bytes")
    # each takes a byte at least, so that only a long header can hold too many: the others need not be counted
    count = _Counter(limits.containers) if len(frame) > limits.containers else None
    try:
        header = msgpack.unpackb(frame, raw=False, strict_map_key=True, object_hook=count, list_hook=count)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError("bad_msgpack", str(error)[:200]) from None
    if not isinstance(header, dict) or not isinstance(header.get("type"), str):
        raise WireError("bad_header", "not a map with a type")
    # each level begins with a byte of its own, so that what has few of them need not be looked through
    if len(bytes(frame).translate(None, _NO_CONTAINERS)) > limits.depth and _is_deeper(header, limits.depth):
        raise WireError("too_deep", f"more than {limits.depth} levels of nesting")
    return header


class _Counter:
    """Sees each list and map as it is unpacked, and stops at one too many."""

    def __init__(self, most: int) -> None:
        self._left = most

    def __call__(self, container: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise WireError("too_many_containers", "lists and maps in a header")
        return container


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and maps are nested in more than ``depth`` levels; looks level by level, without recursion."""
    level = [value]
    for _ in range(depth):
        contents = [item.values() if isinstance(item, dict) else item for item in level]
        level = [child for content in contents for child in content if isinstance(child, dict | list)]
        if not level:
            return False
    return True
