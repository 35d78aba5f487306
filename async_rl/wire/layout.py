"""Which arrays a group has, and where in its frames each lies.

    Group ─ lay_out ─► Laid: description, joint part, large frames
    description, total ─ placement ─► Placement ─ views ─► arrays

    description = msgpack [[name, dtype, [axis, ...]], ...]       a first axis of nil is the sum of the lengths

It does not change from one group to the next, but for the sum of the lengths: a receiver checks a description once, and
then knows it by its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np

from async_rl.data import REQUIRED_TOKEN_FIELDS, TOKEN_FIELDS, UNALIGNED, Array, Group
from async_rl.errors import WireError
from async_rl.wire.header import LIMITS, Frame, pack_header

JOINT_BELOW = 16_384
"""Bytes: smaller arrays share a frame."""
REWARDS = "rewards"
_DTYPES = {
    name: np.dtype(name) for name in ("int8", "uint8", "int32", "int64", "float16", "float32", "float64", "bool")
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_TOKEN_DTYPES = {name: np.dtype(dtype) for name, dtype in TOKEN_FIELDS.items()}
_MOST_NAME = 200
"""Characters of an array's name."""
_MOST_AXES = 8
_MOST_DESCRIPTION = 1 << 16
_REMEMBERED_BELOW = 1024
"""Bytes: longer descriptions are read each time, so that what is remembered is bounded."""
_ALIGNED = 8
_PADDING = tuple(bytes(n) for n in range(_ALIGNED))
_Spec = tuple[str, np.dtype[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the arrays of a group lie."""

    joint: int
    """Bytes of all small arrays, each filled up."""
    large: list[int]
    """Bytes of each large array, in order."""
    arrays: list[tuple[str, np.dtype[Any], int, tuple[int, ...] | None, int, int]]
    """Name, type, number of elements, shape (``None``: one axis), frame (0: the joint one), and offset in it."""
    num_rewards: int

    def views(self, frames: Sequence[Frame]) -> dict[str, Array]:
        """Read-only arrays in frames of these sizes, the joint one first."""
        fixed = [frame if type(frame) is bytes else memoryview(frame).toreadonly() for frame in frames]
        arrays: dict[str, Array] = {}
        for name, dtype, count, shape, frame, offset in self.arrays:
            array = np.frombuffer(fixed[frame], dtype, count, offset) if count else _nothing(dtype)
            arrays[name] = array if shape is None else array.reshape(shape)
        return arrays


@dataclass(frozen=True, slots=True)
class Laid:
    """A group's arrays as they go over the wire."""

    description: bytes
    joint: Frame
    """All small arrays, each filled up to a multiple of 8 bytes."""
    large: list[Frame]


def lay_out(group: Group) -> Laid:
    """As it came off the wire, or anew; memory of large arrays is referenced, not copied."""
    if group.laid_out is not None:
        laid: Laid = group.laid_out
        return laid
    specs: list[list[Any]] = []
    joint: list[bytes] = []
    large: list[Frame] = []
    total = sum(group.lengths)
    for name, given in (*group.arrays.items(), (REWARDS, group.rewards)):
        array = given if given.flags.c_contiguous else np.ascontiguousarray(given)
        axes: list[int | None] = [*array.shape]
        if axes[:1] == [total] and name != REWARDS and not name.startswith(UNALIGNED):
            axes[0] = None
        specs.append([name, _NAMES.get(array.dtype) or str(array.dtype), axes])
        if array.nbytes < JOINT_BELOW:
            joint += (array.tobytes(), _PADDING[-array.nbytes % _ALIGNED])
        else:
            large.append(array.data.cast("B"))
    return Laid(pack_header(specs), b"".join(joint), large)


def placement(description: Any, total: int) -> Placement:
    """Read a description.

    Args:
        description: as :func:`lay_out` made it, or anything else.
        total: sum of the group's lengths.

    Raises:
        WireError: ``bad_header``, ``too_many_arrays``, ``bad_dtype``, ``bad_shape``, ``missing_array``.
    """
    if type(description) is not bytes or len(description) > _MOST_DESCRIPTION:
        raise WireError("bad_header", f"arrays must be described by {_MOST_DESCRIPTION} bytes at most")
    return _known(description, total) if len(description) < _REMEMBERED_BELOW else _read(description, total)


def _read(description: bytes, total: int) -> Placement:
    specs = _specs(description)
    _check(specs)
    joint = num_rewards = 0
    large: list[int] = []
    placed = []
    for name, dtype, axes in specs:
        shape = _shape(name, axes, total)
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if nbytes < JOINT_BELOW:
            frame, offset = 0, joint
            joint += nbytes + -nbytes % _ALIGNED
        else:
            large.append(nbytes)
            frame, offset = len(large), 0
        if name == REWARDS:
            num_rewards = count
        placed.append((name, dtype, count, shape if len(shape) > 1 else None, frame, offset))
    return Placement(joint, large, placed, num_rewards)


_known = lru_cache(maxsize=1024)(_read)


def _specs(description: bytes) -> list[_Spec]:
    """Name, type and axes of each array."""
    try:
        rows = msgpack.unpackb(description, raw=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        raise WireError("bad_header", "a description of arrays that is no msgpack") from None
    if type(rows) is not list:
        raise WireError("bad_header", "a description of arrays is a list")
    if len(rows) > LIMITS.arrays:
        raise WireError("too_many_arrays", str(len(rows)))
    specs: list[_Spec] = []
    for row in rows:
        if type(row) is not list or len(row) != 3 or type(row[0]) is not str or type(row[2]) is not list:
            raise WireError("bad_header", "an array is [name, dtype, axes]")
        name, kind, axes = row
        if len(name) > _MOST_NAME:
            raise WireError("bad_header", f"an array's name of {len(name)} characters")
        dtype = _DTYPES.get(kind) if type(kind) is str else None
        if dtype is None:
            raise WireError("bad_dtype", f"{name}: {kind:.60}" if type(kind) is str else f"{name}: not a text")
        specs.append((name, dtype, axes))
    if len({name for name, *_ in specs}) < len(specs):
        raise WireError("bad_header", "two arrays of one name")
    return specs


def _check(specs: Sequence[_Spec]) -> None:
    """Raise unless the arrays are those of a group, and fit to each other."""
    named: Mapping[str, tuple[np.dtype[Any], list[Any]]] = {name: (dtype, axes) for name, dtype, axes in specs}
    has_tokens = "tokens" in named
    for name in (*(REQUIRED_TOKEN_FIELDS if has_tokens else ("versions",)), REWARDS):
        if name not in named:
            raise WireError("missing_array", name)
    for name, (dtype, axes) in named.items():
        if not axes or len(axes) > _MOST_AXES or not all(type(n) is int and 0 <= n < 1 << 40 for n in axes[1:]):
            raise WireError("bad_shape", f"{name} has 1 to {_MOST_AXES} axes, each a natural number")
        is_own = name == REWARDS or name.startswith(UNALIGNED)
        if axes[0] is not None and not (is_own and type(axes[0]) is int and 0 <= axes[0] < 1 << 40):
            raise WireError("bad_shape", f"the first axis of {name} is not the sum of the lengths")
        wanted = _TOKEN_DTYPES.get(name) if has_tokens else None
        if wanted is not None and (dtype is not wanted or len(axes) != 1):
            raise WireError("bad_dtype", f"{name} must be {wanted} [T], got {dtype} of {len(axes)} axes")
    dtype, axes = named[REWARDS]
    if dtype != np.float32 or len(axes) != 1:
        raise WireError("missing_array", "rewards must be float32 with one entry per trajectory")


def _shape(name: str, axes: Sequence[int | None], total: int) -> tuple[int, ...]:
    shape = tuple(total if n is None else n for n in axes)
    # numpy multiplies the other axes of an empty array, too
    if math.prod(max(n, 1) for n in shape) > LIMITS.frame_bytes:
        raise WireError("bad_shape", f"{name}: {shape}")
    return shape


@lru_cache(maxsize=len(_DTYPES))
def _nothing(dtype: np.dtype[Any]) -> Array:
    empty = np.empty(0, dtype)
    empty.flags.writeable = False
    return empty
