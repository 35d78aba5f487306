"""Puts the sections of the report together and writes the page.

run folder ─► RunFolder ─► summary (the finished one, else what is known so far) ─► sections ─► report.html
"""

from __future__ import annotations

from collections.abc import Collection
from html import escape
from pathlib import Path

from async_rl.errors import ConfigError
from async_rl.report import control_sections, sections
from async_rl.report.style import style_sheet
from async_rl.runfolder import RunFolder, write_atomically
from async_rl.summary import summarize

_CHARTS = {"reward/mean": "Reward of the trained batch", "accuracy": "Accuracy on the trained batch"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The browser itself refuses to fetch or run anything, whatever a sample may hold."""


def write_report(folder: Path) -> Path:
    """Write ``folder/report.html``, also for a run that goes on or was cut off.

    Raises:
        ConfigError: the folder is not there or holds no run.
    """
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} is no run folder: it has no config.toml")
    page = folder / "report.html"
    write_atomically(page, render(RunFolder(folder)))
    return page


def render(run: RunFolder) -> str:
    """The page as text."""
    summary = run.summary or summarize(run, outcome=None)
    books, metrics, timeline = run.books, run.metrics, run.timeline
    reasons = {kind: books.get(kind) or {} for kind in ("filtered", "failed", "refused")}
    if control_sections.is_control(summary):
        shown: Collection[str] = control_sections.CHARTS
        learning = control_sections.curves(metrics, run.evals)
        unit = "environment steps"
    else:
        shown, unit = _CHARTS, "tokens"
        learning = [sections.learning(metrics, name, label) for name, label in _CHARTS.items()]
        learning.append(sections.held_out(run.evals))
    body = [
        *learning,
        sections.ages(summary.get("staleness") or {}, unit),
        sections.usage(timeline, str(summary.get("bottleneck") or "")),
        sections.ledger(summary.get("ledger") or {}, reasons),
        sections.scoring(summary.get("stages") or {}),
        sections.weights(summary),
        sections.processes(summary),
        sections.others(metrics, shown),
        sections.samples(run.samples),
        sections.configuration(run.config_text),
    ]
    title = escape(run.path.resolve().name)
    status, reason = escape(str(summary.get("status", "running"))), str(summary.get("reason") or "")
    why = f'<p class="{"bad" if status == "failed" else "soft"}">{escape(reason)}</p>' if reason else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{style_sheet()}</style></head><body><main>"
        f"<h1>{title}</h1><p class=soft>{status}</p>{why}{sections.headline(summary)}"
        f'<div class="sections">{"".join(body)}</div></main></body></html>\n'
    )
