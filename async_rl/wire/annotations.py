"""Annotations in messages: each is described by its stage and its number of values, which are one frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from async_rl.data import Annotation
from async_rl.errors import WireError
from async_rl.wire.groups import entries_of, natural
from async_rl.wire.header import LIMITS, SCHEMA_VERSION, Frame, Header, Limits, pack_header

_MOST_STAGE = 200
_VALUE = np.dtype(np.float32)


def encode_annotations(message_type: str, annotations: Sequence[Annotation], **fields: Any) -> list[Frame]:
    """Encode annotations into one message; ``fields`` join the header. Array memory is referenced, not copied."""
    described, frames = [], []
    for item in annotations:
        values = np.ascontiguousarray(item.values, _VALUE)
        described.append({"ordinal": item.ordinal, "attempt": item.attempt, "stage": item.stage, "values": values.size})
        frames.append(values.data.cast("B") if values.size else b"")
    return [pack_header({"type": message_type, "schema": SCHEMA_VERSION, "groups": described, **fields}), *frames]


def decode_annotations(header: Header, frames: Sequence[Frame], limits: Limits = LIMITS) -> list[Annotation]:
    """Rebuild the annotations that ``header`` describes, with values as read-only views of ``frames``.

    Raises:
        WireError: ``schema_mismatch``, ``bad_header``, ``too_many_groups``, ``frame_count``, ``frame_too_large``,
            ``bad_shape``.
    """
    described = entries_of(header, limits)
    if len(described) != len(frames):
        raise WireError("frame_count", f"{len(described)} described, {len(frames)} received")
    annotations = []
    for entry, frame in zip(described, frames, strict=True):
        if not isinstance(entry, dict):
            raise WireError("bad_header", "an annotation is not a map")
        ordinal, attempt, count = (natural(entry, key) for key in ("ordinal", "attempt", "values"))
        stage = entry.get("stage")
        if type(stage) is not str or len(stage) > _MOST_STAGE:
            raise WireError("bad_header", "stage must be a short text")
        if len(frame) > limits.frame_bytes:
            raise WireError("frame_too_large", f"{stage}: {len(frame)} bytes")
        if len(frame) != count * _VALUE.itemsize:
            raise WireError("bad_shape", f"{stage}: {count} values of float32 are not {len(frame)} bytes")
        values = np.frombuffer(frame, _VALUE)
        values.flags.writeable = False
        annotations.append(Annotation(ordinal=ordinal, attempt=attempt, stage=stage, values=values))
    return annotations
