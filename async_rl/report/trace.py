"""``trace.json``: the timeline of a run as Chrome trace events, one track per process (open it in Perfetto).

timeline.jsonl (name, role, spans) ─► {"traceEvents": [...]}      times in µs since the first span
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.runfolder import Row, RunFolder, write_atomically

Spans = dict[str, list[tuple[str, float, float]]]


def spans_by_process(timeline: Sequence[Row]) -> Spans:
    """Spans (state, start, end) in epoch seconds per process name, in order; neighbours of equal state are joined."""
    collected: Spans = {}
    for row in timeline:
        spans = collected.setdefault(str(row.get("name", "?")), [])
        for state, start, end in row.get("spans", []):
            if spans and spans[-1][0] == state and 0 <= start - spans[-1][2] < 1e-3:
                spans[-1] = (state, spans[-1][1], float(end))
            else:
                spans.append((str(state), float(start), float(end)))
    return collected


def roles(timeline: Sequence[Row]) -> dict[str, str]:
    """Role of each process name."""
    return {str(row.get("name", "?")): str(row.get("role", "?")) for row in timeline}


def trace_events(timeline: Sequence[Row]) -> list[dict[str, Any]]:
    """Complete events (``ph: X``) and the names of the tracks (``ph: M``), sorted by role, then name."""
    collected, role_of = spans_by_process(timeline), roles(timeline)
    starts = [spans[0][1] for spans in collected.values() if spans]
    origin = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for track, name in enumerate(sorted(collected, key=lambda n: (role_of[n], n)), start=1):
        events.append({"ph": "M", "name": "process_name", "pid": track, "tid": 0, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": track, "tid": 0, "args": {"sort_index": track}})
        for state, start, end in collected[name]:
            times = {"ts": round((start - origin) * 1e6, 1), "dur": round((end - start) * 1e6, 1)}
            events.append({"ph": "X", "name": state, "cat": role_of[name], "pid": track, "tid": 0, **times})
    return events


def write_trace(out: Path) -> None:
    """Write ``out/trace.json`` from ``out/timeline.jsonl``."""
    document = {"displayTimeUnit": "ms", "traceEvents": trace_events(RunFolder(out).timeline)}
    write_atomically(out / "trace.json", json.dumps(document))
