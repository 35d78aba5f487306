"""The table of docs/performance.md from the JSON files that the benchmarks wrote.

    python scripts/bench_page.py OUT [--page docs/performance.md]

OUT/*.json (async_rl.bench.figures.show) ─► one table a benchmark ─► between the two marks of the page
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from async_rl.runfolder import write_atomically

BEGIN, END = "<!-- figures: written by scripts/bench_page.py -->", "<!-- end of figures -->"


def main(
    out: Annotated[Path, typer.Argument(help="folder with the JSON files of the benchmarks")],
    page: Annotated[Path, typer.Option(help="page whose table is replaced")] = Path("docs/performance.md"),
) -> None:
    """Replace the table."""
    try:
        documents = [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    except ValueError as error:
        raise typer.BadParameter(f"a file in {out} is no whole JSON document: {error}") from error
    found = [document for document in documents if "figures" in document]
    if not found:
        raise typer.BadParameter(f"{out} holds no JSON file of a benchmark")
    try:
        write_atomically(page, replaced(page.read_text(), tables(found)))
    except ValueError as error:
        raise typer.BadParameter(f"{page}: {error}") from error
    print(f"{page}: {len(found)} benchmarks")


def replaced(text: str, table: str) -> str:
    """The page with another table between its marks.

    Raises:
        ValueError: it has no such marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the lines {BEGIN!r} and {END!r} are missing")
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


def tables(documents: Sequence[Mapping[str, Any]]) -> str:
    """All benchmarks, the machine named once for each that differs."""
    parts = []
    for document in documents:
        machine = document["machine"]
        head = f"{document['bench']} ({machine['processor']}, {machine['cores']} cores, Python {machine['python']})"
        lines = ["| figure | median | spread | baseline | ratio | bar |", "|---|---|---|---|---|---|"]
        parts.append("\n".join([f"**{head}**", "", *lines, *map(row, document["figures"])]) + "\n")
    return "\n".join(parts)


def row(figure: Mapping[str, Any]) -> str:
    """One line."""
    base = figure["baseline_values"]
    beside = f"{figure['baseline']}: {number(statistics.median(base))}" if base else ""
    ratio = "" if figure["ratio"] is None else f"{figure['ratio']:.2f}"
    bar = ""
    if figure["bar"] is not None:
        sign, end = "≤" if figure["at_most"] else "≥", "met" if figure["met"] else "**missed**"
        bar = f"{sign} {figure['bar']:g} {end}"
    middle = f"{number(figure['median'])} {figure['unit']}".strip()
    return f"| {figure['name']} | {middle} | ±{100 * figure['spread']:.0f} % | {beside} | {ratio} | {bar} |"


def number(value: float) -> str:
    """Three digits, or whole."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    typer.run(main)
