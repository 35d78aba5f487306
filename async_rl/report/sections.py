"""The sections of the report: each turns what is in the run folder into a piece of HTML, or "" when there is nothing.

Every text from the run (prompts, answers, names, reasons) passes through ``escape`` on its way in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from async_rl.form import number
from async_rl.report.svg import Series, bar_chart, line_chart, running_mean, shares_chart
from async_rl.report.trace import roles, spans_by_process
from async_rl.report.usage import fractions, seconds_per_state, shares_over_time, without_pauses
from async_rl.runfolder import Row
from async_rl.timer import STATES, WORK
from async_rl.units import format_bytes, format_seconds

BINS = 240
MAX_SAMPLES = 24
_SMOOTH = 10
_ORDER = sorted(STATES, key=lambda state: state not in WORK)
"""Work at the bottom of each band, waiting on top."""
_BOOKS = ("open", "scoring", "ready", "delivered", "trained", "filtered", "failed")


def headline(summary: Mapping[str, Any]) -> str:
    """The few numbers that matter most, as cards."""
    evals, throughput = summary.get("eval") or {}, summary.get("throughput") or {}
    staleness, used = summary.get("staleness") or {}, summary.get("utilization") or {}
    cards = [
        ("steps", f"{summary.get('steps', 0):,}"),
        ("wall-clock", format_seconds(summary["wall_s"]) if summary.get("wall_s") is not None else None),
        ("held-out accuracy at the start", _number(evals.get("accuracy_start"), ".3f")),
        ("held-out accuracy", _number(evals.get("accuracy"), ".3f")),
        ("return at the start", _number(evals.get("return_start"), ",.4g")),
        ("return", _number(evals.get("return"), ",.4g")),
        ("rate of success", _number(evals.get("success"), ".0%")),
        ("trained tokens/s", _number(throughput.get("trained_tokens_per_s"), ",.0f")),
        ("environment steps/s", _number(throughput.get("env_steps_per_s"), ",.0f")),
        ("largest age, bound", _pair(staleness.get("max"), staleness.get("bound"))),
        ("learner at work", _number(used.get("learner"), ".0%")),
        ("actors at work", _number(used.get("actors"), ".0%")),
        ("scorers at work", _number(used.get("scorers"), ".0%")),
    ]
    shown = [f'<div class="card"><b>{escape(value)}</b><span>{name}</span></div>' for name, value in cards if value]
    return f'<div class="cards">{"".join(shown)}</div>' if shown else ""


def learning(metrics: Sequence[Row], name: str, label: str) -> str:
    """One metric over steps: pale as measured, bold as running mean."""
    rows = [row for row in metrics if name in row]
    xs, ys = [float(row["step"]) for row in rows], [_float(row[name]) for row in rows]
    if all(y is None for y in ys):
        return ""
    lines = [Series(label=label, xs=xs, ys=ys, faint=True)]
    lines.append(Series(label=f"{label}, mean of {_SMOOTH} steps", xs=xs, ys=running_mean(ys, _SMOOTH)))
    return section(label, line_chart(lines, x_label="step"))


def held_out(evals: Sequence[Row]) -> str:
    """Held-out accuracy and reward by version."""
    xs = [float(row["version"]) for row in evals]
    names = [n for n in ("accuracy", "reward") if any(n in (row.get("metrics") or {}) for row in evals)]
    lines = [
        Series(label=n, xs=xs, ys=[_float((row.get("metrics") or {}).get(n)) for row in evals], colour=i, dots=True)
        for i, n in enumerate(names)
    ]
    chart = line_chart(lines, x_label="version")
    return section("Held-out evaluation (greedy, one version each)", chart) if chart else ""


def ages(staleness: Mapping[str, Any], unit: str = "tokens") -> str:
    """Tokens (or another unit) by age when they were trained, with the bound."""
    histogram = {int(k): float(v) for k, v in (staleness.get("histogram") or {}).items()}
    if not histogram:
        return ""
    bound = staleness.get("bound")
    bars = [(str(a), histogram.get(a, 0.0)) for a in range(max(histogram) + 1)]
    limit = f"; bound {bound}, dashed" if bound is not None else ""
    text = f'<p class="soft">Trained {unit} by age in learner versions{limit}; mean {staleness.get("mean", 0):.2f}.</p>'
    mark = bound if bound is not None and bound < len(bars) else None
    return section("Staleness", text + bar_chart(bars, x_label="age", mark=mark))


def usage(timeline: Sequence[Row], verdict: str) -> str:
    """Who waited for whom, each process's states over time, and each state's share of its whole life."""
    collected, role_of = spans_by_process(timeline), roles(timeline)
    collected = {n: collected[n] for n in sorted(collected, key=lambda n: (role_of[n], n)) if collected[n]}
    if not collected:
        return ""
    shares, seconds = shares_over_time(without_pauses(collected), BINS)
    used = [s for s in _ORDER if any(s == state for spans in collected.values() for state, _, _ in spans)]
    rows = []
    for name, spans in collected.items():
        part = fractions(seconds_per_state(spans))
        rows.append([name, *(f"{part[s]:.1%}" if s in part else "" for s in used)])
    heads = ["process", *(s.replace("_", " ") for s in used)]
    told = f"<p>{escape(verdict)}</p>" if verdict else ""
    chart = shares_chart(shares, _ORDER, seconds=seconds)
    return section("What each process did", told + chart + table(heads, rows), wide=True)


def ledger(books: Mapping[str, Any], reasons: Mapping[str, Mapping[str, Any]]) -> str:
    """The books with their equation, and why groups were filtered, failed or refused."""
    if not books:
        return ""
    parts = " + ".join(f"{name} {books.get(name, 0):,}" for name in _BOOKS)
    closed = books.get("issued") == sum(books.get(name, 0) for name in _BOOKS)
    verdict = "the books close" if closed else '<span class="bad">the books do not close</span>'
    equation = f"<p>issued {books.get('issued', 0):,} = {parts} — {verdict}.</p>"
    rows = [[kind, reason, f"{count:,}"] for kind, counts in reasons.items() for reason, count in counts.items()]
    return section("Ledger (tickets)", equation + (table(["outcome", "reason", "count"], rows) if rows else ""))


def scoring(stages: Mapping[str, Mapping[str, Any]]) -> str:
    """What the scorers of each stage did."""
    rows = [
        [
            name,
            f"{facts.get('annotated', 0):,}",
            _number(facts.get("groups_per_s"), ".1f") or "–",
            *(f"{facts.get(k, 0):,}" for k in _TRIES),
        ]
        for name, facts in stages.items()
    ]
    heads = ["stage", "groups", "groups/s while there were any", "failed tries", "leases given back"]
    return section("Scorers", table(heads, rows)) if rows else ""


_TRIES = ("failed", "returned")


def weights(summary: Mapping[str, Any]) -> str:
    """Bytes and times of the weight versions."""
    facts = summary.get("weights") or {}
    if not facts:
        return ""
    rows = [
        ["bytes of a version", format_bytes(facts["bytes"]) if facts.get("bytes") else "–"],
        ["versions published", f"{facts.get('versions', 0):,}"],
        *([label, _number(facts.get(name), ".4f") or "–"] for name, label in _WEIGHT_TIMES.items()),
        *([label, format_bytes(facts[name])] for name, label in _WEIGHT_BYTES.items() if facts.get(name)),
        *([label, f"{facts.get(name) or 0:,}"] for name, label in _WEIGHT_COUNTS.items() if facts.get("chunks")),
    ]
    return section("Weights", table(["", ""], rows))


_WEIGHT_TIMES = {
    "publish_s": "publish, mean s",
    "transfer_s": "transfer and verify, mean s",
    "commit_s": "swap into the engine, mean s",
    "pause_s": "generation paused for a swap, median s",
    "pause_share": "share of the actors' time that these pauses took",
}
_WEIGHT_BYTES = {
    "learner_bytes": "received over the network from the learner",
    "relay_bytes": "received from other actor hosts",
}
_WEIGHT_COUNTS = {
    "chunks": "chunks received",
    "delta_chunks": "of them as differences",
    "failed_deltas": "differences that were wrong, and sent whole",
    "relays_left": "times that an actor host was given up for the learner",
}


def processes(summary: Mapping[str, Any]) -> str:
    """CPU seconds and restarts."""
    cpu_s, restarts = summary.get("cpu_s") or {}, summary.get("restarts") or {}
    rows = [[name, f"{seconds:.1f}", str(restarts.get(name, 0))] for name, seconds in cpu_s.items()]
    return section("Processes", table(["process", "CPU s", "restarts"], rows)) if rows else ""


def others(metrics: Sequence[Row], shown: Iterable[str]) -> str:
    """Every other metric as a small chart, folded."""
    skip = {"step", "time", *shown}
    names = sorted({name for row in metrics for name in row} - skip)
    xs = [float(row["step"]) for row in metrics]
    items = []
    for name in names:
        chart = line_chart([Series(label=name, xs=xs, ys=[_float(r.get(name)) for r in metrics])], x_label="step")
        if chart:
            items.append(f"<details><summary>{escape(name)}</summary>{chart}</details>")
    return section("All metrics", f'<div class="columns">{"".join(items)}</div>', wide=True) if items else ""


def samples(rows: Sequence[Row]) -> str:
    """Groups as text, evenly over the run, newest first, each with its rewards."""
    stride = max(1, len(rows) // MAX_SAMPLES)
    picked = rows[::-1][::stride][:MAX_SAMPLES]
    items = []
    for row in picked:
        head = f"version {row.get('version', '?')}, ticket {row.get('ordinal', '?')}"
        rewards = row.get("rewards") or []
        answers = [_answer(str(text), rewards, i) for i, text in enumerate(row.get("completions") or [])]
        prompt = f"<pre>{escape(str(row.get('prompt', '')))}</pre>"
        items.append(f"<details><summary>{escape(head)}</summary>{prompt}{''.join(answers)}</details>")
    return section("Samples", "".join(items), wide=True) if items else ""


def configuration(text: str) -> str:
    """The resolved configuration."""
    if not text:
        return ""
    return section("Configuration", f"<details><summary>config.toml</summary><pre>{escape(text)}</pre></details>")


def section(title: str, body: str, *, wide: bool = False) -> str:
    """A titled box."""
    return f"<section{' class=wide' if wide else ''}><h2>{escape(title)}</h2>{body}</section>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells that start with a digit are set right."""
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    lines = ["".join(f"<td{' class=n' if c[:1].isdigit() else ''}>{escape(c)}</td>" for c in row) for row in rows]
    top = f"<tr>{head}</tr>" if any(heads) else ""
    return f'<div class="scroll"><table>{top}{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _float(value: Any) -> float | None:
    found = number(value)
    return None if found is None else float(found)


def _number(value: Any, spec: str) -> str | None:
    return None if value is None else format(value, spec)


def _pair(value: Any, bound: Any) -> str | None:
    return None if value is None else f"{value} of {bound}" if bound is not None else str(value)


def _answer(text: str, rewards: Sequence[Any], index: int) -> str:
    value = _float(rewards[index]) if index < len(rewards) else None
    reward = "unknown" if value is None else f"{value:g}"
    return f'<div class="sample"><pre>{escape(text)}</pre><span class="soft">reward {reward}</span></div>'
