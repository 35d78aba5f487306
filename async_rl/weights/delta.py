"""The lossless difference of two versions of a chunk: what optimiser steps change is a little of each number.

    new - base as whole numbers, mod 2^n ─► zigzag: 0 -1 1 -2 2 ... ─► planes of bytes ─► deflate ─► frame
    frame ─► inflate ─► planes ─► zigzag undone ─► added to the base in place, mod 2^n

The bits of a float as a whole number rise with its size, so that a small change of the value is a small number, also
where the exponent changes and an XOR would flip many bits. The upper planes are then nearly all zeros. Pure.
"""

from __future__ import annotations

import zlib

import numpy as np

from async_rl.errors import WeightsError

_RAW = -15
"""Deflate without header and checksum: the chunk has one of its own."""
_SIZES = (2, 4)
_LEVEL = 1
"""With Z_RLE: runs of no change come again, words of changes do not; to look for them costs bytes (docs/scaling.md)."""


def encode(base: memoryview, new: memoryview, itemsize: int) -> bytes:
    """What :func:`apply` makes ``new`` of ``base`` with.

    Args:
        base: bytes [n].
        new: bytes [n].
        itemsize: bytes of an element, 2 (bfloat16) or 4 (float32).

    Raises:
        ValueError: the sizes do not fit.
    """
    if itemsize not in _SIZES or base.nbytes != new.nbytes or new.nbytes % itemsize:
        raise ValueError(f"a delta from {base.nbytes} to {new.nbytes} bytes of elements of {itemsize}")
    kind = f"u{itemsize}"
    difference = np.frombuffer(new, kind) - np.frombuffer(base, kind)
    sign = (difference.view(f"i{itemsize}") >> (8 * itemsize - 1)).view(kind)
    folded = (difference << 1) ^ sign
    planes = np.ascontiguousarray(folded.view(np.uint8).reshape(-1, itemsize).T)
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    return b"".join((bytes([itemsize]), packer.compress(planes.data), packer.flush()))


def apply(target: memoryview, frame: bytes | memoryview) -> None:
    """Make the next version of what ``target`` holds, in place.

    Args:
        target: writable bytes of the base [n].
        frame: from :func:`encode`, or from a stranger: what it makes has to be verified.

    Raises:
        WeightsError: it is no delta of so many bytes. The target may have been written.
    """
    itemsize = frame[0] if len(frame) else 0
    if itemsize not in _SIZES or target.nbytes % itemsize:
        raise WeightsError(f"no delta for {target.nbytes} bytes: elements of {itemsize}")
    unpacker = zlib.decompressobj(_RAW)
    try:
        packed = unpacker.decompress(frame[1:], target.nbytes + 1)  # no more, whatever it says
    except zlib.error as error:
        raise WeightsError(f"a damaged delta: {error}") from None
    if len(packed) != target.nbytes:
        raise WeightsError(f"a delta of {len(packed)} bytes for {target.nbytes}")
    kind = f"u{itemsize}"
    planes = np.frombuffer(packed, np.uint8).reshape(itemsize, -1)
    folded = np.ascontiguousarray(planes.T).view(kind).ravel()
    values = np.frombuffer(target, kind)
    values += (folded >> 1) ^ -(folded & 1)
