"""Typed reads from headers that came off the network: a missing or wrong field is a counted refusal, never a crash."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from async_rl.errors import WireError

T = TypeVar("T")
_MAX_INT = 1 << 62


def take(header: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """The field, of exactly this type (a bool is no int).

    Raises:
        WireError: ``bad_field``, naming it.
    """
    value: Any = header.get(name, default)
    if type(value) is kind and _is_small(value):
        return value
    raise WireError("bad_field", f"{header.get('type')}.{name} must be {kind.__name__}, got {_short(value)}")


def number(header: Mapping[str, Any], name: str, default: float = 0.0) -> float:
    """A finite number.

    Raises:
        WireError: ``bad_field``.
    """
    value = header.get(name, default)
    if not is_number(value):
        raise WireError("bad_field", f"{header.get('type')}.{name} must be a number, got {_short(value)}")
    return float(value)


def numbers(raw: Any) -> dict[str, float]:
    """The entries of a map that are finite numbers under text keys; anything else is left out."""
    if not isinstance(raw, dict):
        return {}
    return {k: float(v) for k, v in raw.items() if isinstance(k, str) and is_number(v)}


def spans(raw: Any) -> list[list[Any]]:
    """The well-formed ``[state, start, end]`` of a list; anything else is left out."""
    if not isinstance(raw, list):
        return []
    return [
        [s[0], float(s[1]), float(s[2])]
        for s in raw
        if isinstance(s, list) and len(s) == 3 and isinstance(s[0], str) and is_number(s[1]) and is_number(s[2])
    ]


def is_number(value: Any) -> bool:
    """Whether it is a finite int or float."""
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e300


def _is_small(value: Any) -> bool:
    return not isinstance(value, int) or abs(value) < _MAX_INT


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
