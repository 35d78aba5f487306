"""The lossless difference of two versions of a chunk: what optimiser steps change is a little of each number.

    new - base as whole numbers, mod 2^n ─► zigzag: 0 -1 1 -2 2 ... ─► planes of bytes ─► zstandard ─► frame
    frame ─► as many bytes as the base has, or none ─► planes ─► zigzag undone ─► added to the base in place, mod 2^n

The bits of a float as a whole number rise with its size, so that a small change of the value is a small number, also
where the exponent changes and an XOR would flip many bits. The upper planes are then nearly all zeros. Pure.
"""

from __future__ import annotations

import numpy as np
import zstandard

from async_rl.errors import WeightsError

_SIZES = (2, 4)
_SETTINGS = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6)
"""With a table that finds little but runs: changes do not come again as words do, and to look for them costs time
(docs/scaling.md). It writes the size of what it packs into the frame."""
_BLOCK = 1 << 16
"""Numbers that are worked on at a time, so that they stay in the cache between one operation and the next."""


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
    olds, news = np.frombuffer(base, kind), np.frombuffer(new, kind)
    planes = np.empty((itemsize, len(news)), np.uint8)
    for first in range(0, len(news), _BLOCK):
        block = slice(first, first + _BLOCK)
        difference = news[block] - olds[block]
        sign = (difference.view(f"i{itemsize}") >> (8 * itemsize - 1)).view(kind)
        folded = (difference << 1) ^ sign
        for plane in range(itemsize):
            planes[plane, block] = folded >> (8 * plane)  # the lowest byte of that
    return bytes([itemsize]) + zstandard.ZstdCompressor(compression_params=_SETTINGS).compress(planes.data)


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
    kind = f"u{itemsize}"
    planes = np.frombuffer(_unpacked(frame[1:], target.nbytes), np.uint8).reshape(itemsize, -1)
    values = np.frombuffer(target, kind)
    for first in range(0, len(values), _BLOCK):
        block = slice(first, first + _BLOCK)
        folded = planes[0, block].astype(kind)
        for plane in range(1, itemsize):
            folded |= planes[plane, block].astype(kind) << (8 * plane)
        sign = -(folded & 1)
        folded >>= 1
        folded ^= sign
        values[block] += folded


def _unpacked(packed: bytes | memoryview, nbytes: int) -> bytes:
    """What was packed, if it says that it is of this size: the memory for it is taken by what it says."""
    try:
        told = zstandard.frame_content_size(packed)
        if told != nbytes:
            raise WeightsError(f"a delta of another size: {told} bytes for {nbytes}")
        return zstandard.ZstdDecompressor().decompress(packed, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WeightsError(f"a damaged delta: {error}") from None
