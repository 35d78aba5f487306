"""The forms of a run folder's files: what of them their readers rely on. Who writes which: docs/architecture.md."""

from __future__ import annotations

import re
from typing import Any

from async_rl.form import Each, Fields, Items, number, text, whole

_LATEST = 1e12
"""Seconds since the epoch lie before it."""
_AGE = re.compile(r"[0-9]{1,4}")


def moment(value: Any) -> float | None:
    """Seconds since the epoch, to the microsecond."""
    found = number(value)
    return round(float(found), 6) if found is not None and 0 <= found < _LATEST else None


def span(value: Any) -> list[Any] | None:
    """``[state, start, end]``."""
    if not isinstance(value, list) or len(value) != 3:
        return None
    state, start, end = text(value[0]), moment(value[1]), moment(value[2])
    return [state, start, end] if state is not None and start is not None and end is not None and start <= end else None


def rewards(value: Any) -> list[int | float | None] | None:
    """A list of numbers; what is none leaves a gap, so that each keeps its place."""
    return [number(item) for item in value] if isinstance(value, list) else None


def texts(value: Any) -> list[str] | None:
    """A list of texts, each in its place."""
    return [text(item) or "" for item in value] if isinstance(value, list) else None


def count(value: Any) -> int | None:
    """How often something happened."""
    found = whole(value)
    return found if found is not None and found >= 0 else None


def metrics_row(value: Any) -> dict[str, Any] | None:
    """A line of ``metrics.jsonl``: a step, and a number or None by name."""
    row = _NUMBERS(value)
    if row is None or whole(row.get("step")) is None:
        return None
    if "time" in row:
        row["time"] = moment(row["time"])
    return row


_NUMBERS = Each(number, nullable=True)
_COUNTS = Each(count)
_STALENESS = Fields(
    {
        "max": number,
        "mean": number,
        "bound": number,
        "histogram": Each(count, key=lambda age: _AGE.fullmatch(age) is not None),
    }
)
SERVER = Fields({"address": text, "pid": whole, "run_id": text})
BOOKS = Fields(
    {
        "status": text,
        "reason": text,
        "run_id": text,
        "step": count,
        "steps": count,
        "books": _COUNTS,
        "filtered": _COUNTS,
        "failed": _COUNTS,
        "refused": _COUNTS,
        "staleness": _STALENESS,
        "tokens": _COUNTS,
        "control": _NUMBERS,
        "stages": Each(Each(number)),
        "weights": _NUMBERS,
        "utilization": _NUMBERS,
    }
)
SUMMARY = Fields(
    {
        "status": text,
        "reason": text,
        "steps": count,
        "wall_s": number,
        "eval": _NUMBERS,
        "throughput": _NUMBERS,
        "episodes": _NUMBERS,
        "utilization": _NUMBERS,
        "states": Each(_NUMBERS),
        "bottleneck": text,
        "staleness": _STALENESS,
        "ledger": _COUNTS,
        "stages": Each(Each(number, nullable=True)),
        "weights": _NUMBERS,
        "cpu_s": Each(number),
        "restarts": _COUNTS,
    }
)
EVAL = Fields({"version": whole, "epoch": whole, "metrics": _NUMBERS, "wall_s": number}, needed=("version",))
BEAT = Fields({"name": text, "role": text, "spans": Items(span)}, needed=("spans",))
SAMPLE = Fields({"ordinal": whole, "version": whole, "prompt": text, "completions": texts, "rewards": rewards})
