"""Charts as inline SVG text: lines, bars, stacked shares over time. Pure functions; colours are CSS classes.

Nothing is fetched and no script runs: a chart is a string, hovering shows ``<title>`` texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 660, 240
WIDE = 1360
"""Width of a chart that takes a whole row, so that its text is as large as that of the others."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 12, 34
_MAX_POINTS = 700
_NUM_COLOURS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: ``ys[i]`` at ``xs[i]``; ``None`` leaves a gap."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: int = 0
    """Index of the CSS class ``c0`` ... ``c7``."""
    faint: bool = False
    """Thin and pale, as background of a smoothed line."""
    dots: bool = False
    """Mark each point."""


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return round(self.start + (value - self.low) / span * (self.end - self.start), 1)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers (1, 2 or 5 times a power of ten) that lie in ``[low, high]``."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 0.0
    if power == 0:  # so close together that floats hold nothing between them
        return [low]
    step = next((m * power for m in (1, 2, 5) if m * power >= rough), 10 * power)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def running_mean(ys: Sequence[float | None], window: int) -> list[float | None]:
    """Mean of the last ``window`` values at each place, missing ones left out."""
    means: list[float | None] = []
    for end in range(1, len(ys) + 1):
        known = [y for y in ys[max(0, end - window) : end] if y is not None]
        means.append(sum(known) / len(known) if known else None)
    return means


def line_chart(series: Sequence[Series], *, x_label: str, y_range: tuple[float, float] | None = None) -> str:
    """Lines over a common axis; an empty string when there is no point."""
    xs = [x for s in series for x, y in zip(s.xs, s.ys, strict=True) if y is not None]
    ys = [y for s in series for y in s.ys if y is not None]
    if not xs:
        return ""
    low, high = y_range or _padded(min(ys), max(ys))
    x = _Scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, _LEFT, WIDTH - _RIGHT)
    y = _Scale(low, high, HEIGHT - _BOTTOM, _TOP)
    body = [_grid(x, y, x_label)]
    body += [_line(s, x, y) for s in series]
    legend = [(s.label, f"c{s.colour}") for s in series if not s.faint]
    return _figure("".join(body), WIDTH, HEIGHT, legend)


def bar_chart(bars: Sequence[tuple[str, float]], *, x_label: str, mark: int | None = None) -> str:
    """Bars with a label below and their value above; a dashed line behind bar number ``mark``."""
    if not bars:
        return ""
    top = max(value for _, value in bars) or 1.0
    y = _Scale(0.0, top * 1.12, HEIGHT - _BOTTOM, _TOP)
    slot = (WIDTH - _LEFT - _RIGHT) / len(bars)
    body = [_y_grid(y)]
    total = sum(value for _, value in bars) or 1.0
    for i, (label, value) in enumerate(bars):
        left, width = _LEFT + i * slot + slot * 0.12, min(slot * 0.76, 80)
        upper, middle = y(value), round(left + width / 2, 1)
        title = f"<title>{escape(label)}: {value:,.0f} ({value / total:.1%})</title>"
        height = round(y(0) - upper, 1)
        body.append(
            f'<rect class="c0" x="{left:.1f}" y="{upper}" width="{width:.1f}" height="{height}" rx="2">{title}</rect>'
        )
        body.append(
            f'<text class="t" x="{middle}" y="{HEIGHT - _BOTTOM + 15}" text-anchor="middle">{escape(label)}</text>'
        )
        body.append(f'<text class="t" x="{middle}" y="{upper - 4}" text-anchor="middle">{value / total:.0%}</text>')
    if mark is not None:
        at = round(_LEFT + min(mark + 1, len(bars)) * slot, 1)
        body.append(f'<line class="mark" x1="{at}" x2="{at}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
    body.append(_x_label(x_label))
    return _figure("".join(body), WIDTH, HEIGHT, [])


def shares_chart(shares: Mapping[str, Sequence[Mapping[str, float]]], states: Sequence[str], *, seconds: float) -> str:
    """One band per process: in each time bin the share of each state, stacked.

    Args:
        shares: process name to bins; a bin maps states to fractions that sum to at most 1.
        states: order of stacking and of colours.
        seconds: length of the time axis.
    """
    if not shares:
        return ""
    band, gap, left = 46, 12, 96
    height = _TOP + len(shares) * (band + gap) + _BOTTOM
    x = _Scale(0.0, seconds or 1.0, left, WIDE - _RIGHT)
    body: list[str] = []
    for row, (name, bins) in enumerate(shares.items()):
        top = _TOP + row * (band + gap)
        body.append(f'<rect class="empty" x="{left}" y="{top}" width="{WIDE - _RIGHT - left}" height="{band}"/>')
        body.append(f'<text class="t" x="{left - 6}" y="{top + band / 2 + 4}" text-anchor="end">{escape(name)}</text>')
        body += _band(bins, states, x, top, band, seconds)
    for tick in nice_ticks(0.0, seconds, 10):
        body.append(f'<text class="t" x="{x(tick)}" y="{height - 18}" text-anchor="middle">{tick:g}</text>')
    body.append(_x_label("seconds", WIDE, height))
    used = [s for s in states if any(b.get(s, 0.0) > 0 for bins in shares.values() for b in bins)]
    return _figure("".join(body), WIDE, height, [(s.replace("_", " "), f"s-{s}") for s in used])


def _band(
    bins: Sequence[Mapping[str, float]], states: Sequence[str], x: _Scale, top: float, band: float, seconds: float
) -> list[str]:
    width = x(seconds / max(1, len(bins))) - x(0.0)
    paths: dict[str, list[str]] = {}
    for i, shares in enumerate(bins):
        base, left = top + band, x(i * seconds / len(bins))
        for state in states:
            height = shares.get(state, 0.0) * band
            if height >= 0.1:
                paths.setdefault(state, []).append(f"M{left} {base:.1f}v{-height:.1f}h{width:.1f}v{height:.1f}z")
                base -= height
    return [f'<path class="s-{s}" d="{"".join(d)}"><title>{escape(s)}</title></path>' for s, d in paths.items()]


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _line(series: Series, x: _Scale, y: _Scale) -> str:
    stride = max(1, math.ceil(len(series.xs) / _MAX_POINTS))
    pieces, pen = [], "M"
    marks = []
    for i, (px, py) in enumerate(zip(series.xs, series.ys, strict=True)):
        if py is None:
            pen = "M"
        elif i % stride == 0 or i == len(series.xs) - 1:
            pieces.append(f"{pen}{x(px)} {y(py)}")
            pen = "L"
            if series.dots:
                title = f"<title>{escape(series.label)}: {py:.4g} at {px:g}</title>"
                marks.append(f'<circle class="c{series.colour}" cx="{x(px)}" cy="{y(py)}" r="3.5">{title}</circle>')
    style = "line faint" if series.faint else "line"
    path = f'<path class="{style} c{series.colour % _NUM_COLOURS}" d="{"".join(pieces)}"/>'
    return path + "".join(marks)


def _grid(x: _Scale, y: _Scale, x_label: str) -> str:
    ticks = [t for t in nice_ticks(x.low, x.high, 7) if t == int(t) or x.high - x.low < 5]
    texts = [f'<text class="t" x="{x(t)}" y="{HEIGHT - _BOTTOM + 15}" text-anchor="middle">{t:g}</text>' for t in ticks]
    return _y_grid(y) + "".join(texts) + _x_label(x_label)


def _y_grid(y: _Scale) -> str:
    lines = []
    for tick in nice_ticks(y.low, y.high):
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>')
        lines.append(f'<text class="t" x="{_LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{short(tick)}</text>')
    return "".join(lines)


def _x_label(text: str, width: float = WIDTH, height: float = HEIGHT) -> str:
    return f'<text class="t" x="{width - _RIGHT}" y="{height - 3}" text-anchor="end">{escape(text)}</text>'


def short(value: float) -> str:
    """``1.2M``, ``350k``, ``0.05``."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):g}{suffix}"
    return f"{value:g}"


def _figure(body: str, width: float, height: float, legend: Sequence[tuple[str, str]]) -> str:
    keys = "".join(f'<span class="key"><i class="{escape(css)}"></i>{escape(label)}</span>' for label, css in legend)
    svg = f'<svg viewBox="0 0 {width} {height}" role="img" xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    return f"<figure>{svg}<figcaption>{keys}</figcaption></figure>" if keys else f"<figure>{svg}</figure>"
