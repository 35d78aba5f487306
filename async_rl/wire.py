"""Groups on the wire: one msgpack header, then raw frames. No pickle, no copies of array data that is worth a frame.

    message = [ msgpack header | frames of the first group | frames of the second | ... ]
    header  = {"type": ..., "schema": 2, ..., "groups": [ {ids, lengths, "arrays": [[name, dtype, shape], ...]}, ... ]}
    group   = [ all arrays below JOINT_BELOW, one behind the other | array | array | ... ]

The arrays of a group, of which the rewards are one, come in the order in which they are listed: the small ones in a
joint frame, each filled up to a multiple of 8 bytes, because a frame costs more than to copy them; then each larger one
in a frame of its own. A group without small arrays has no joint frame. What was decoded remembers its frames, so that
it goes on to the journal and to the learner as it came. An annotation is described as a group with one array, named by
its stage, and without lengths, task and meta; it has one frame. Whatever does not fit is refused with a
:class:`~async_rl.errors.WireError` whose ``reason`` the server counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import msgpack
import numpy as np
import zmq

from async_rl.data import REQUIRED_TOKEN_FIELDS, TOKEN_FIELDS, UNALIGNED, Annotation, Group
from async_rl.errors import WireError

SCHEMA_VERSION = 2
Frame = bytes | memoryview
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""As plain numbers, which the socket takes at once."""
_COPY_BELOW = 65_536
"""Frames smaller than this are copied out of and into a socket's buffers; larger ones are used in place."""
Header = dict[str, Any]

JOINT_BELOW = 16_384
"""Bytes: smaller arrays share a frame."""
_DTYPES = {
    name: np.dtype(name) for name in ("int8", "uint8", "int32", "int64", "float16", "float32", "float64", "bool")
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_TOKEN_DTYPES = {name: np.dtype(dtype) for name, dtype in TOKEN_FIELDS.items()}
_REWARDS = "rewards"
_ALIGNED = 8
_PADDING = tuple(bytes(n) for n in range(_ALIGNED))
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
    name: int = 200
    """Characters of an array's name."""
    depth: int = 32
    """Nesting of a header: what is deeper would overflow the stack of whoever prints or writes it."""
    containers: int = 1 << 18
    """Lists and maps in a header: an empty one is one byte on the wire, and more than fifty in memory. The manifest of
    100,000 tensors has fewer."""
    meta_bytes: int = 1 << 20
    """A group's ``meta``: whoever gets several groups in one message could not read their header otherwise."""


LIMITS = Limits()


def receive_frames(socket: zmq.Socket[bytes]) -> list[Frame]:
    """The frames of the rest of a message that waits in the socket.

    Raises:
        zmq.Again: none waits.
    """
    frames: list[Frame] = []
    while True:
        part = socket.recv(_NOBLOCK, copy=False)
        frames.append(part.bytes if len(part) < _COPY_BELOW else part.buffer)
        if not part.more:
            return frames


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    """Send a message at once; small frames are copied, which is faster, large ones are used in place.

    Raises:
        zmq.ZMQError: from the first frame: the socket takes no message now, or has no such peer.
    """
    for frame in frames[:-1]:
        socket.send(frame, _MORE, copy=len(frame) < _COPY_BELOW)
    socket.send(frames[-1], _NOBLOCK, copy=len(frames[-1]) < _COPY_BELOW)


def pack_header(header: Mapping[str, Any]) -> bytes:
    """Serialise a header of plain types."""
    packed: bytes = msgpack.packb(header, use_bin_type=True)
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


def encode_groups(message_type: str, groups: Sequence[Group], *, with_meta: bool = True, **fields: Any) -> list[Frame]:
    """Encode groups into one message; ``fields`` join the header. Memory of large arrays is referenced, not copied.

    Args:
        message_type: of the message.
        groups: in its order.
        with_meta: False: without their ``meta``, which is for people.
        fields: of the header.
    """
    described: list[dict[str, Any]] = []
    frames: list[Frame] = []
    for group in groups:
        specs, own = group.laid_out or _lay_out(group)
        frames += own
        described.append(
            {
                "ordinal": group.ordinal,
                "attempt": group.attempt,
                "task_index": group.task_index,
                "lengths": group.lengths,
                "arrays": specs,
                "meta": dict(group.meta) if with_meta else {},
            }
        )
    header = {"type": message_type, "schema": SCHEMA_VERSION, "groups": described, **fields}
    return [pack_header(header), *frames]


def _lay_out(group: Group) -> tuple[list[list[Any]], list[Frame]]:
    """The group's arrays as they are described, and its frames."""
    specs: list[list[Any]] = []
    joint: list[bytes] = []
    frames: list[Frame] = []
    for name, given in (*group.arrays.items(), (_REWARDS, group.rewards)):
        array = given if given.flags.c_contiguous else np.ascontiguousarray(given)
        specs.append([name, _NAMES.get(array.dtype) or str(array.dtype), list(array.shape)])
        if array.nbytes < JOINT_BELOW:
            joint += (array.tobytes(), _PADDING[-array.nbytes % _ALIGNED])
        else:
            frames.append(array.data.cast("B"))
    return specs, [b"".join(joint), *frames] if joint else frames


def decode_groups(header: Header, frames: Sequence[Frame], limits: Limits = LIMITS) -> list[Group]:
    """Rebuild the groups that ``header`` describes as read-only views of ``frames``.

    Raises:
        WireError: ``schema_mismatch``, ``bad_header``, ``too_many_groups``, ``too_many_arrays``, ``frame_count``,
            ``frame_too_large``, ``bad_dtype``, ``bad_shape``, ``missing_array``, ``bad_lengths``, ``meta_too_large``.
    """
    groups, cursor = [], 0
    for entry in _described(header, limits):
        group, own = _decode_group(entry, frames, cursor, limits)
        groups.append(group)
        cursor += own
    if cursor != len(frames):
        raise WireError("frame_count", f"{cursor} described, {len(frames)} received")
    return groups


def encode_annotations(message_type: str, annotations: Sequence[Annotation], **fields: Any) -> list[Frame]:
    """Encode annotations into one message; ``fields`` join the header. Array memory is referenced, not copied."""
    described, frames = [], []
    for item in annotations:
        values = np.ascontiguousarray(item.values)
        spec = [item.stage, str(values.dtype), list(values.shape)]
        described.append({"ordinal": item.ordinal, "attempt": item.attempt, "arrays": [spec]})
        frames.append(values.data.cast("B") if values.size else b"")
    return [pack_header({"type": message_type, "schema": SCHEMA_VERSION, "groups": described, **fields}), *frames]


def decode_annotations(header: Header, frames: Sequence[Frame], limits: Limits = LIMITS) -> list[Annotation]:
    """Rebuild the annotations that ``header`` describes, with values as read-only views of ``frames``.

    Raises:
        WireError: ``schema_mismatch``, ``bad_header``, ``too_many_groups``, ``frame_count``, ``frame_too_large``,
            ``bad_dtype``, ``bad_shape``.
    """
    described = _described(header, limits)
    if len(described) != len(frames):
        raise WireError("frame_count", f"{len(described)} described, {len(frames)} received")
    annotations = []
    for entry, frame in zip(described, frames, strict=True):
        specs = entry.get("arrays") if isinstance(entry, dict) else None
        if not isinstance(specs, list) or len(specs) != 1:
            raise WireError("bad_header", "an annotation has one array")
        ordinal, attempt = _natural(entry, "ordinal"), _natural(entry, "attempt")
        stage, values = _decode_array(specs[0], frame, limits)
        if values.dtype != np.float32 or values.ndim != 1:
            raise WireError("bad_dtype", f"{stage} must be float32 [n], got {values.dtype} {values.shape}")
        annotations.append(Annotation(ordinal=ordinal, attempt=attempt, stage=stage, values=values))
    return annotations


def _described(header: Header, limits: Limits) -> list[Any]:
    """The list of groups in a header.

    Raises:
        WireError: see the callers.
    """
    if header.get("schema") != SCHEMA_VERSION:
        raise WireError("schema_mismatch", f"got {header.get('schema')!r:.60}, this side speaks {SCHEMA_VERSION}")
    described = header.get("groups")
    if not isinstance(described, list):
        raise WireError("bad_header", "groups is not a list")
    if len(described) > limits.groups:
        raise WireError("too_many_groups", str(len(described)))
    return described


def _decode_group(entry: Any, frames: Sequence[Frame], cursor: int, limits: Limits) -> tuple[Group, int]:
    """The group whose frames begin at ``cursor``, and how many they are."""
    if not isinstance(entry, dict):
        raise WireError("bad_header", "a group is not a map")
    ordinal, attempt, task_index = (_natural(entry, k) for k in ("ordinal", "attempt", "task_index"))
    lengths, specs, meta = entry.get("lengths"), entry.get("arrays"), entry.get("meta")
    if not isinstance(lengths, list) or not all(type(n) is int and 0 < n < 1 << 31 for n in lengths) or not lengths:
        raise WireError("bad_lengths", "lengths must be positive whole numbers")
    if len(lengths) > limits.trajectories:
        raise WireError("bad_lengths", f"{len(lengths)} trajectories")
    if not isinstance(specs, list) or not isinstance(meta, dict):
        raise WireError("bad_header", "arrays must be a list and meta a map")
    if len(specs) > limits.arrays:
        raise WireError("too_many_arrays", str(len(specs)))
    if meta and len(pack_header(meta)) > limits.meta_bytes:
        raise WireError("meta_too_large", f"of ordinal {ordinal}")
    arrays, own = _decode_arrays(specs, frames, cursor, limits)
    rewards = arrays.pop(_REWARDS, None)
    if rewards is None or rewards.shape != (len(lengths),) or rewards.dtype != np.float32:
        raise WireError("missing_array", "rewards must be float32 with one entry per trajectory")
    _check_aligned(arrays, sum(lengths))
    group = Group(
        ordinal=ordinal,
        attempt=attempt,
        task_index=task_index,
        lengths=tuple(lengths),
        arrays=arrays,
        rewards=rewards,
        meta=meta,
    )
    object.__setattr__(group, "laid_out", (specs, own))
    return group, len(own)


def _decode_arrays(
    specs: list[Any], frames: Sequence[Frame], cursor: int, limits: Limits
) -> tuple[dict[str, np.ndarray[Any, Any]], list[Frame]]:
    """The arrays that ``specs`` describe, and the frames that they are views of, which begin at ``cursor``."""
    described = [_described_array(spec, limits) for spec in specs]
    if len(set(map(itemgetter(0), described))) < len(described):
        raise WireError("bad_header", "two arrays of one name")
    shared = num_large = 0
    for *_, nbytes, filled in described:
        if nbytes < JOINT_BELOW:
            shared += filled
        else:
            num_large += 1
    at = int(num_large < len(described))
    own = list(frames[cursor : cursor + at + num_large])
    if len(own) < at + num_large:
        raise WireError("frame_count", "fewer frames than arrays")
    for frame in own:
        if len(frame) > limits.frame_bytes:
            raise WireError("frame_too_large", f"{len(frame)} bytes")
    if at and shared != len(own[0]):
        raise WireError("bad_shape", f"small arrays of {shared} bytes are not {len(own[0])} bytes")
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    offset = 0
    for name, dtype, shape, nbytes, filled in described:
        if nbytes < JOINT_BELOW:
            array = np.frombuffer(own[0], dtype, nbytes // dtype.itemsize, offset) if nbytes else np.empty(0, dtype)
            offset += filled
        elif nbytes != len(own[at]):
            raise WireError("bad_shape", f"{name}: {shape} {dtype} is not {len(own[at])} bytes")
        else:
            array = np.frombuffer(own[at], dtype)
            at += 1
        if len(shape) != 1:
            array = array.reshape(shape)
        array.flags.writeable = False
        arrays[name] = array
    return arrays, own


def _check_aligned(arrays: Mapping[str, np.ndarray[Any, Any]], total: int) -> None:
    """Raise unless the arrays of a group whose lengths sum to ``total`` fit to each other."""
    has_tokens = "tokens" in arrays
    for name in REQUIRED_TOKEN_FIELDS if has_tokens else ("versions",):
        if name not in arrays:
            raise WireError("missing_array", name)
    for name, array in arrays.items():
        shape, wanted = array.shape, _TOKEN_DTYPES.get(name) if has_tokens else None
        if shape != (total,) and (not shape or (shape[0] != total and not name.startswith(UNALIGNED))):
            raise WireError("bad_shape", f"{name} {shape}, lengths sum to {total}")
        if wanted is not None and (array.dtype is not wanted or len(shape) != 1):
            raise WireError("bad_dtype", f"{name} must be {wanted} [T], got {array.dtype} {shape}")


def _natural(entry: Mapping[str, Any], key: str) -> int:
    value = entry.get(key)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise WireError("bad_header", f"{key} must be a natural number")
    return value


def _decode_array(spec: Any, frame: Frame, limits: Limits) -> tuple[str, np.ndarray[Any, Any]]:
    """The array that is alone in a frame."""
    name, dtype, shape, nbytes, _ = _described_array(spec, limits)
    if len(frame) > limits.frame_bytes:
        raise WireError("frame_too_large", f"{name}: {len(frame)} bytes")
    if nbytes != len(frame):
        raise WireError("bad_shape", f"{name}: {shape} {dtype} is not {len(frame)} bytes")
    array = np.frombuffer(frame, dtype).reshape(shape)
    array.flags.writeable = False
    return name, array


def _described_array(spec: Any, limits: Limits) -> tuple[str, np.dtype[Any], list[int], int, int]:
    """Name, type, shape, bytes, and bytes when filled up, of an array that has a possible description."""
    if type(spec) is not list or len(spec) != 3 or type(spec[0]) is not str or type(spec[2]) is not list:
        raise WireError("bad_header", "an array is [name, dtype, shape]")
    name, kind, shape = spec
    if len(name) > limits.name:
        raise WireError("bad_header", f"an array's name of {len(name)} characters")
    dtype = _DTYPES.get(kind) if type(kind) is str else None
    if dtype is None:
        raise WireError("bad_dtype", f"{name}: {kind!r:.60}")
    if len(shape) == 1 and type(shape[0]) is int and 0 <= shape[0] <= limits.frame_bytes:
        nbytes = shape[0] * dtype.itemsize
        return name, dtype, shape, nbytes, nbytes + -nbytes % _ALIGNED
    if len(shape) > 8 or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
        raise WireError("bad_shape", f"{name}: {shape!r:.200}")
    # numpy multiplies the other axes of an empty array, too
    if math.prod(max(n, 1) for n in shape) > limits.frame_bytes:
        raise WireError("bad_shape", f"{name}: {shape!r}")
    nbytes = math.prod(shape) * dtype.itemsize
    return name, dtype, shape, nbytes, nbytes + -nbytes % _ALIGNED
