"""What of a JSON value has the form that its reader expects; all else is left out, so that no file can end a reader.

{"step": "x", "books": {"open": 1, "ready": []}} ─ fit, BOOKS ─► {"books": {"open": 1}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LARGEST = 1e300
"""Numbers are below it: sums and charts of larger ones leave the range of floats."""

Form = Callable[[Any], Any]
"""Takes any value of JSON, and gives the part of it that fits, or None."""


def text(value: Any) -> str | None:
    """A text."""
    return value if isinstance(value, str) else None


def number(value: Any) -> int | float | None:
    """A finite number; a truth value is none."""
    if type(value) is int:
        return value if abs(value) < LARGEST else None
    return value if type(value) is float and math.isfinite(value) and abs(value) < LARGEST else None


def whole(value: Any) -> int | None:
    """A whole number of 64 bits."""
    return value if type(value) is int and abs(value) < 1 << 63 else None


@dataclass(frozen=True, slots=True)
class Fields:
    """An object; of its known fields those that fit are kept. It fits itself only with all that are ``needed``."""

    known: Mapping[str, Form]
    needed: tuple[str, ...] = ()

    def __call__(self, value: Any) -> dict[str, Any] | None:
        """The object with what fits of it."""
        if not isinstance(value, dict):
            return None
        found = {k: part for k, form in self.known.items() if k in value and (part := form(value[k])) is not None}
        return found if all(name in found for name in self.needed) else None


@dataclass(frozen=True, slots=True)
class Each:
    """An object with any names; the entries that fit are kept. ``key`` says which names do."""

    form: Form
    key: Callable[[str], bool] = lambda name: True
    nullable: bool = False
    """Whether None fits an entry, too."""

    def __call__(self, value: Any) -> dict[str, Any] | None:
        """The object with what fits of it."""
        if not isinstance(value, dict):
            return None
        fitted = {k: self.form(v) for k, v in value.items() if isinstance(k, str) and self.key(k)}
        return {k: v for k, v in fitted.items() if v is not None or (self.nullable and value[k] is None)}


@dataclass(frozen=True, slots=True)
class Items:
    """A list; the items that fit are kept."""

    form: Form

    def __call__(self, value: Any) -> list[Any] | None:
        """The list with what fits of it."""
        if not isinstance(value, list):
            return None
        return [part for item in value if (part := self.form(item)) is not None]


def parse(source: str | bytes) -> Any:
    """The value of a JSON text; None where it is damaged, too deep, or holds a number that is too long."""
    try:
        return json.loads(source)
    except (ValueError, RecursionError):
        return None
