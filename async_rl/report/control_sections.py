"""Sections of the report that only a control run has: returns and lengths of episodes over environment steps.

metrics.jsonl, evals.jsonl ─► curves of training (last 100 episodes) and evaluation (whole episodes, one version each)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.report.sections import section
from async_rl.report.svg import Series, line_chart
from async_rl.runfolder import Row

CHARTS = ("episode/return", "episode/length")
"""Metrics that are shown here and so not among all others."""
_STEPS = "env_steps/trained"
_SUCCESS = "success"


def is_control(summary: Mapping[str, Any]) -> bool:
    """Whether the run has environments."""
    return bool(summary.get("episodes"))


def curves(metrics: Sequence[Row], evals: Sequence[Row]) -> list[str]:
    """Return and length of episodes, in training and in evaluation; and the rate of success where one is measured."""
    return [
        _curve("Return of an episode", "episode/return", "return", metrics, evals),
        _curve("Steps of an episode", "episode/length", "length", metrics, evals),
        _curve("Rate of success", "", _SUCCESS, metrics, evals),
    ]


def _curve(title: str, trained: str, evaluated: str, metrics: Sequence[Row], evals: Sequence[Row]) -> str:
    rows = [row for row in metrics if row.get(_STEPS) is not None and trained in row]
    lines = []
    if any(row[trained] is not None for row in rows):
        xs, ys = [float(row[_STEPS]) for row in rows], [row[trained] for row in rows]
        lines.append(Series(label="training, mean of the last 100 episodes", xs=xs, ys=ys))
    steps_at = {0: 0.0} | {int(row["step"]) + 1: float(row[_STEPS]) for row in metrics if row.get(_STEPS) is not None}
    found = [
        (steps_at[row["version"]], float(row["metrics"][evaluated]))
        for row in evals
        if row["version"] in steps_at and (row.get("metrics") or {}).get(evaluated) is not None
    ]
    if found:
        xs, ys = [x for x, _ in found], [y for _, y in found]
        lines.append(Series(label="evaluation, most likely actions", xs=xs, ys=ys, colour=1, dots=True))
    return section(title, line_chart(lines, x_label="environment steps")) if lines else ""
