"""Groups in messages, see :mod:`async_rl.wire`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.data import Group
from async_rl.errors import WireError
from async_rl.wire.header import LIMITS, SCHEMA_VERSION, Frame, Header, Limits, pack_header
from async_rl.wire.joint import JointReader, joined
from async_rl.wire.layout import REWARDS, Laid, lay_out, placement


def encode_groups(message_type: str, groups: Sequence[Group], *, with_meta: bool = True, **fields: Any) -> list[Frame]:
    """Encode groups into one message; ``fields`` join the header. Memory of large arrays is referenced, not copied.

    Args:
        message_type: of the message.
        groups: in its order.
        with_meta: False: without their ``meta``, which is for people.
        fields: of the header.
    """
    laid = [lay_out(group) for group in groups]
    described = [
        {
            "ordinal": group.ordinal,
            "attempt": group.attempt,
            "task_index": group.task_index,
            "lengths": group.lengths,
            "arrays": own.description,
            "meta": dict(group.meta) if with_meta else {},
        }
        for group, own in zip(groups, laid, strict=True)
    ]
    header = {"type": message_type, "schema": SCHEMA_VERSION, "groups": described, **fields}
    return [pack_header(header), *joined(laid)]


def decode_groups(header: Header, frames: Sequence[Frame], limits: Limits = LIMITS) -> list[Group]:
    """Rebuild the groups that ``header`` describes as read-only views of ``frames``.

    Raises:
        WireError: ``schema_mismatch``, ``bad_header``, ``too_many_groups``, ``too_many_arrays``, ``frame_count``,
            ``frame_too_large``, ``bad_dtype``, ``bad_shape``, ``missing_array``, ``bad_lengths``, ``meta_too_large``.
    """
    entries = entries_of(header, limits)
    reader = JointReader(frames, limits.frame_bytes, len(entries))
    groups: list[Group] = []
    num_arrays = 0
    for entry in entries:
        groups.append(_decode_group(entry, reader, limits))
        num_arrays += len(groups[-1].arrays)
        if num_arrays > limits.containers:  # an empty one is a few bytes on the wire, and some hundred in memory
            raise WireError("too_many_arrays", "in one message")
    reader.end()
    return groups


def entries_of(header: Header, limits: Limits) -> list[Any]:
    """What a header describes: its list of groups, or of annotations.

    Raises:
        WireError: see the callers.
    """
    if header.get("schema") != SCHEMA_VERSION:
        raise WireError("schema_mismatch", f"got {header.get('schema')!r:.60}, this side speaks {SCHEMA_VERSION}")
    entries = header.get("groups")
    if not isinstance(entries, list):
        raise WireError("bad_header", "groups is not a list")
    if len(entries) > limits.groups:
        raise WireError("too_many_groups", str(len(entries)))
    return entries


def natural(entry: Mapping[str, Any], key: str) -> int:
    """A field that says which attempt, or which task.

    Raises:
        WireError: ``bad_header``.
    """
    value = entry.get(key)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise WireError("bad_header", f"{key} must be a natural number")
    return value


def _decode_group(entry: Any, reader: JointReader, limits: Limits) -> Group:
    if not isinstance(entry, dict):
        raise WireError("bad_header", "a group is not a map")
    ordinal = natural(entry, "ordinal")
    attempt, task_index = natural(entry, "attempt"), natural(entry, "task_index")
    lengths, meta = entry.get("lengths"), entry.get("meta")
    description: Any = entry.get("arrays")
    if type(lengths) is not list:
        raise WireError("bad_lengths", "lengths must be a list")
    total = _total(lengths, limits)
    if not isinstance(meta, dict):
        raise WireError("bad_header", "meta must be a map")
    if meta and len(pack_header(meta)) > limits.meta_bytes:
        raise WireError("meta_too_large", f"of ordinal {ordinal}")
    placed = placement(description, total)
    if placed.num_rewards != len(lengths):
        raise WireError("missing_array", "rewards must be float32 with one entry per trajectory")
    if len(placed.arrays) > limits.arrays:
        raise WireError("too_many_arrays", str(len(placed.arrays)))
    joint, large = reader.take(placed)
    arrays = placed.views([joint, *large])
    group = Group(
        ordinal=ordinal,
        attempt=attempt,
        task_index=task_index,
        lengths=tuple(lengths),
        rewards=arrays.pop(REWARDS),
        arrays=arrays,
        meta=meta,
    )
    object.__setattr__(group, "laid_out", Laid(description, joint, large))
    return group


def _total(lengths: list[Any], limits: Limits) -> int:
    """Their sum.

    Raises:
        WireError: ``bad_lengths``.
    """
    if set(map(type, lengths)) != {int} or min(lengths) <= 0 or max(lengths) >= 1 << 31:
        raise WireError("bad_lengths", "lengths must be positive whole numbers")
    if len(lengths) > limits.trajectories:
        raise WireError("bad_lengths", f"{len(lengths)} trajectories")
    return sum(lengths)
