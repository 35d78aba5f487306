"""The picture of ``async-rl bench utilization``: speed-up beside the ideal, and how busy each side was. Pure text.

runs as plain rows ─► chart (an SVG with its own style) ─► page (HTML around it)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_LEFT, _TOP, _HEIGHT, _GAP = 60, 46, 190, 66
_BAR, _BETWEEN, _SPACE = 34, 14, 34
_TITLE = 360
"""Least width, for the titles."""
_STYLE = (
    "text{font:12px sans-serif;fill:#333}.h{font-weight:bold}.grid{stroke:#ddd}.ideal{stroke:#c33;stroke-width:2}"
    ".speed{fill:#4878a8}.learner{fill:#4878a8}.actors{fill:#e0913f}"
)

Row = Mapping[str, Any]


def chart(rows: Sequence[Row]) -> str:
    """A self-contained SVG: above, speed-up over the synchronous mode with a red mark at the ideal; below, busy shares.

    Args:
        rows: of :func:`async_rl.bench.utilization.to_plain`, in the order in which they are drawn.
    """
    lefts = _lefts(rows)
    width = max(_TITLE, lefts[-1] + 2 * _BAR + _SPACE if rows else 0)
    height = 2 * (_TOP + _HEIGHT + _GAP)
    speeds = [row["speedup"] or 0.0 for row in rows]
    top = 1.15 * max([*speeds, *(row["ideal"] for row in rows)], default=1.0)
    body = [f"<style>{_STYLE}</style>", f'<rect width="{width}" height="{height}" fill="white"/>']
    body += _axis("speed-up over synchronous; red: ideal", _TOP, top, width)
    for row, left, speed in zip(rows, lefts, speeds, strict=True):
        if row["speedup"] is not None:
            body.append(_bar("speed", left + _BAR / 2, _TOP, speed / top, f"{speed:.2f}"))
        at = _TOP + _HEIGHT * (1 - row["ideal"] / top)
        body.append(f'<line class="ideal" x1="{left}" x2="{left + 2 * _BAR}" y1="{at:.1f}" y2="{at:.1f}"/>')
        body += _label(row, left, _TOP)
    lower = 2 * _TOP + _HEIGHT + _GAP
    body += _axis("busy: learner (blue), actors' slots (orange)", lower, 1.15, width)
    for row, left in zip(rows, lefts, strict=True):
        for place, side in enumerate(("learner", "actors")):
            share = row[f"{side}_busy"]
            body.append(_bar(side, left + place * _BAR, lower, share / 1.15, f"{100 * share:.0f} %"))
        body += _label(row, left, lower)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">{"".join(body)}</svg>'
    )


def page(svg: str) -> str:
    """HTML that holds it."""
    title = "async-rl bench utilization"
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><body>{svg}</body></html>\n'


def _lefts(rows: Sequence[Row]) -> list[float]:
    """Left edges of the pairs of bars; a space between ratios."""
    lefts: list[float] = []
    at = float(_LEFT + _BETWEEN)
    for number, row in enumerate(rows):
        if number and row["ratio"] != rows[number - 1]["ratio"]:
            at += _SPACE
        lefts.append(at)
        at += 2 * _BAR + _BETWEEN
    return lefts


def _axis(title: str, top: float, most: float, width: float) -> list[str]:
    parts = [f'<text class="h" x="{_LEFT}" y="{top - 16}">{escape(title)}</text>']
    step = next(s for s in (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0) if most / s <= 6 or s == 100.0)
    for number in range(int(most / step) + 1):
        y = top + _HEIGHT * (1 - number * step / most)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number * step:g}</text>')
    return parts


def _bar(kind: str, left: float, top: float, share: float, text: str) -> str:
    height = _HEIGHT * share
    y = top + _HEIGHT - height
    middle = left + _BAR / 2
    rect = f'<rect class="{kind}" x="{left}" y="{y:.1f}" width="{_BAR}" height="{height:.1f}"/>'
    return f'{rect}<text x="{middle}" y="{y - 4:.1f}" text-anchor="middle">{escape(text)}</text>'


def _label(row: Row, left: float, top: float) -> list[str]:
    middle, below = left + _BAR, top + _HEIGHT
    words = str(row["mode"]).split("_")
    lines = [" ".join(words[:2]), " ".join(words[2:])] if len(words) > 2 else [" ".join(words), ""]
    lines = [line for line in lines if line] + [f"actors {row['ratio']:g} ×"]
    return [
        f'<text x="{middle}" y="{below + 16 + 14 * number}" text-anchor="middle">{escape(line)}</text>'
        for number, line in enumerate(lines)
    ]
