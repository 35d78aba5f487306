"""Rows of an ``ack``, for actors and scorers alike, and the count of what was refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

from async_rl.buffer.records import Answer
from async_rl.wire import Header

Row = list[Any]
"""[ordinal, attempt, outcome, reason]"""


def row(ordinal: int, attempt: int, answer: Answer, refused: Counter[str]) -> Row:
    """One row; what is refused, or late for the first time, is counted by reason."""
    if answer.outcome == "refused":
        refused[answer.reason] += 1
    elif answer.outcome == "late" and answer.fresh:
        refused[f"late_{answer.reason}"] += 1
    return [ordinal, attempt, answer.outcome, answer.reason]


def attempts_of(header: Header) -> list[tuple[int, int]]:
    """(ordinal, attempt) of what a message describes that could not be decoded, as far as they can be read."""
    described = header.get("groups")
    entries = [e for e in described if isinstance(e, dict)] if isinstance(described, list) else []
    keys = [(e.get("ordinal"), e.get("attempt")) for e in entries]
    return [(o, a) for o, a in keys if type(o) is int and type(a) is int]
