"""Typed reads from headers that came off the network: a missing or wrong field is a counted refusal, never a crash."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, TypeVar

from async_rl.errors import WireError

T = TypeVar("T")
_MAX_INT = 1 << 62
_MOST_AMOUNT = 1e15
_MOST_NUMBER = 1e30
"""Sums of many numbers below it stay finite."""
_MOST_ENTRIES = 512
_MOST_ROWS = 4096
_MOST_NAME = 200
_MOST_REASONS = 64


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
    """An amount of seconds or bytes: a number from 0 to 10^15.

    Raises:
        WireError: ``bad_field``.
    """
    value = header.get(name, default)
    if not is_number(value) or not 0 <= value < _MOST_AMOUNT:
        raise WireError("bad_field", f"{header.get('type')}.{name} must be a number from 0 on, got {_short(value)}")
    return float(value)


def natural(header: Mapping[str, Any], name: str) -> int:
    """A whole number from 0 on.

    Raises:
        WireError: ``bad_field``.
    """
    value = take(header, name, int)
    if value < 0:
        raise WireError("bad_field", f"{header.get('type')}.{name} must not be negative, got {value}")
    return value


def numbers(raw: Any) -> dict[str, float]:
    """The entries of a map that are finite numbers under short names, some hundreds at most; the rest is left out."""
    if not isinstance(raw, dict):
        return {}
    fit = {k: float(v) for k, v in raw.items() if isinstance(k, str) and len(k) <= _MOST_NAME and is_number(v)}
    return dict(islice(fit.items(), _MOST_ENTRIES))


def spans(raw: Any) -> list[list[Any]]:
    """The well-formed ``[state, start, end]`` of a list; anything else is left out."""
    if not isinstance(raw, list):
        return []
    return [
        [s[0][:_MOST_NAME], float(s[1]), float(s[2])]
        for s in raw[:_MOST_ROWS]
        if isinstance(s, list) and len(s) == 3 and isinstance(s[0], str) and is_number(s[1]) and is_number(s[2])
    ]


def pairs(raw: Any) -> frozenset[tuple[int, int]]:
    """The first two entries of each list that begins with two ints; anything else is left out."""
    rows = [row for row in raw[:_MOST_ROWS] if isinstance(row, list) and len(row) >= 2] if isinstance(raw, list) else []
    return frozenset((row[0], row[1]) for row in rows if type(row[0]) is int and type(row[1]) is int)


def is_number(value: Any) -> bool:
    """Whether it is a finite int or float of a size that can be added up."""
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < _MOST_NUMBER


def shown(value: Any, most: int = 200) -> str:
    """What a client says, as it may stand in a log: one line of at most ``most`` printable characters."""
    text = (value if isinstance(value, str) else repr(value))[:most]
    return "".join(c if c.isprintable() else " " for c in text)


def slug(header: Mapping[str, Any], known: Collection[str]) -> str:
    """The reason that a client gives, to be counted beside the ``known`` ones; ``other`` where those are many.

    Raises:
        WireError: ``bad_field``.
    """
    reason = shown(take(header, "reason", str), 80)
    return reason if reason in known or len(known) < _MOST_REASONS else "other"


def _is_small(value: Any) -> bool:
    return not isinstance(value, int) or abs(value) < _MAX_INT


def _short(value: Any) -> str:
    text = repr(value[:61] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 60 else text[:57] + "..."
