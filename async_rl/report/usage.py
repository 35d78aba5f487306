"""Who worked and who waited, from the timeline: seconds per state, utilisation of a role, shares over time.

timeline.jsonl ─► spans per process ─┬─► seconds per state ─► utilisation (warm-up excluded)
                                     └─► bins of shares per state ─► the report's bands
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from async_rl.report.trace import Spans, roles, spans_by_process
from async_rl.runfolder import Row
from async_rl.timer import utilization

Seconds = dict[str, float]

MIN_PAUSE_S = 5.0


def seconds_per_state(spans: Sequence[tuple[str, float, float]]) -> Seconds:
    """Sum of the spans' lengths by state."""
    seconds: Seconds = {}
    for state, start, end in spans:
        seconds[state] = seconds.get(state, 0.0) + (end - start)
    return seconds


def role_utilization(timeline: Sequence[Row], role: str) -> float | None:
    """Share of wall-clock in which the role's processes did their own work, over all of them; ``None`` without any.

    See :func:`role_seconds` and :func:`async_rl.timer.utilization`.
    """
    pooled = role_seconds(timeline, role)
    return utilization(pooled) if pooled else None


def role_shares(timeline: Sequence[Row], role: str) -> Seconds:
    """Each state's share of the time of the role's processes, start-up excluded; they sum to 1, or there are none."""
    return fractions({state: s for state, s in role_seconds(timeline, role).items() if state != "starting"})


def role_seconds(timeline: Sequence[Row], role: str) -> Seconds:
    """Seconds per state of all processes of a role, warm-up excluded.

    Only what lies between the learner's first and last training counts.
    """
    role_of, collected = roles(timeline), spans_by_process(timeline)
    training = [s for n, spans in collected.items() if role_of[n] == "learner" for s in spans if s[0] == "training"]
    begin = min((start for _, start, _ in training), default=-math.inf)
    end = max((stop for _, _, stop in training), default=math.inf)
    pooled: Seconds = {}
    for name in (n for n in collected if role_of[n] == role):
        clipped = [(state, max(start, begin), min(stop, end)) for state, start, stop in collected[name]]
        for state, seconds in seconds_per_state([span for span in clipped if span[2] > span[1]]).items():
            pooled[state] = pooled.get(state, 0.0) + seconds
    return pooled


def without_pauses(collected: Spans) -> Spans:
    """The same spans with the times cut out in which no process lived, as between a stop and a resume."""
    bounds = sorted((start, stop) for spans in collected.values() for _, start, stop in spans)
    cuts: list[tuple[float, float]] = []
    alive_until = bounds[0][0] if bounds else 0.0
    for start, stop in bounds:
        if start - alive_until > MIN_PAUSE_S:
            cuts.append((start, start - alive_until))
        alive_until = max(alive_until, stop)

    def moved(time: float) -> float:
        return time - sum(length for end, length in cuts if time >= end)

    return {name: [(s, moved(a), moved(b)) for s, a, b in spans] for name, spans in collected.items()}


def shares_over_time(collected: Spans, bins: int) -> tuple[dict[str, list[Seconds]], float]:
    """For each process and each of ``bins`` equal parts of the run, the share of each state; and the run's length.

    Shares of a bin sum to at most 1; to less where a process did not live.
    """
    ends = [(spans[0][1], spans[-1][2]) for spans in collected.values() if spans]
    if not ends:
        return {}, 0.0
    begin, end = min(start for start, _ in ends), max(stop for _, stop in ends)
    width = (end - begin) / bins or 1.0
    shares: dict[str, list[Seconds]] = {}
    for name, spans in collected.items():
        rows: list[Seconds] = [{} for _ in range(bins)]
        for state, start, stop in spans:
            _spread(rows, state, (start - begin) / width, (stop - begin) / width)
        shares[name] = rows
    return shares, end - begin


def _spread(rows: list[Seconds], state: str, start: float, stop: float) -> None:
    """Add the interval ``[start, stop]`` (in bins) to the bins that it covers."""
    for i in range(max(0, int(start)), min(len(rows) - 1, int(stop)) + 1):
        covered = min(stop, i + 1.0) - max(start, float(i))
        if covered > 0:
            rows[i][state] = rows[i].get(state, 0.0) + covered


def fractions(seconds: Mapping[str, float]) -> Seconds:
    """Each state's share of the total."""
    total = sum(seconds.values())
    return {state: value / total for state, value in seconds.items()} if total > 0 else {}
