"""What a benchmark measured: repetitions of a figure and of its baseline, their median, spread and ratio.

paired(ours, baseline) ─► Figure ─► show: a table on the terminal, a JSON file

Ours and the baseline take turns, so that what else a machine does meets both alike; a ratio is the median of the ratios
of the pairs.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from async_rl.runfolder import write_atomically

REPEATS = 5
"""Repetitions of a figure and its baseline, at least."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, measured repeatedly.

    Attributes:
        name: what is measured, with its size, such as ``transport, 1 MiB``.
        unit: of the values, such as ``GB/s``.
        values: one per repetition.
        baseline: what it is compared with; empty: with nothing.
        baseline_values: of the same unit, pair by pair.
        bar: what the ratio to the baseline (without one: the median) is to reach; None: nothing was promised.
        at_most: whether it is to stay below the bar instead.
    """

    name: str
    unit: str
    values: tuple[float, ...]
    baseline: str = ""
    baseline_values: tuple[float, ...] = ()
    bar: float | None = None
    at_most: bool = False

    @property
    def median(self) -> float:
        """Of our values."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles, as a share of the median; 0 for one value."""
        if len(self.values) < 2 or not self.median:
            return 0.0
        lower, _, upper = statistics.quantiles(self.values, n=4, method="inclusive")
        return (upper - lower) / 2 / abs(self.median)

    @property
    def ratio(self) -> float | None:
        """Median over the pairs of our value / the baseline's."""
        if not self.baseline_values:
            return None
        return statistics.median(ours / theirs for ours, theirs in zip(self.values, self.baseline_values, strict=True))

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None without one."""
        if self.bar is None:
            return None
        reached = self.median if self.ratio is None else self.ratio
        return reached <= self.bar if self.at_most else reached >= self.bar


def paired(
    ours: Callable[[], float], baseline: Callable[[], float], repeats: int = REPEATS, warmup: int = 1
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Run both in turns, the one that begins alternating; what the ``warmup`` first pairs gave is dropped.

    Args:
        ours: runs once and returns the figure.
        baseline: the same for what it is compared with.
        repeats: pairs that count.
        warmup: pairs before them.
    """
    mine: list[float] = []
    theirs: list[float] = []
    for number in range(warmup + repeats):
        turns = [(ours, mine), (baseline, theirs)]
        for run, values in turns if number % 2 == 0 else reversed(turns):
            values.append(run())
    return tuple(mine[warmup:]), tuple(theirs[warmup:])


def show(title: str, figures: Sequence[Figure], out: Path | None, **facts: Any) -> None:
    """Print a table; with ``out``, write all values as JSON, too.

    Args:
        title: such as ``transport``.
        figures: one row each.
        out: the JSON file.
        facts: of plain types, what a reader needs to repeat it.
    """
    from rich.console import Console  # the command line's --help does without it
    from rich.table import Table

    table = Table("figure", "median", "spread", "baseline", "ratio", "bar", title=title)
    for figure in figures:
        bar = "" if figure.bar is None else f"{'≤' if figure.at_most else '≥'} {figure.bar:g}"
        if figure.met is not None:
            bar += " met" if figure.met else " MISSED"
        beside = f"{figure.baseline}: {_text(statistics.median(figure.baseline_values))}" if figure.baseline else ""
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        middle = f"{_text(figure.median)} {figure.unit}"
        table.add_row(figure.name, middle, f"±{100 * figure.spread:.0f} %", beside, ratio, bar)
    Console().print(table)
    if out is not None:
        document = {"bench": title, "machine": machine(), **facts, "figures": [_row(figure) for figure in figures]}
        write_atomically(out, json.dumps(document, indent=1) + "\n")


def machine() -> Mapping[str, Any]:
    """What these figures depend on."""
    return {"processor": _processor(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


def _row(figure: Figure) -> dict[str, Any]:
    computed = {name: getattr(figure, name) for name in ("median", "spread", "ratio", "met")}
    return asdict(figure) | computed


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
