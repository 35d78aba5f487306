"""What chaos did to a run, by the files that it left: a list of losses, each a sentence; empty if nothing was lost.

summary.json, books.json ─┐
batches.jsonl ────────────┼─► verdict ─► losses          evals.jsonl of an undisturbed run ─► how far ours may lie below
config.toml, evals.jsonl ─┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.config import load_any
from async_rl.runfolder import RunFolder, read_json, read_jsonl

TOLERANCE = {"accuracy": 0.03, "return": 25.0, "success": 0.05}
"""How far the last evaluation may lie below the undisturbed run's."""


def verdict(out: Path, undisturbed: Mapping[str, float] | None) -> list[str]:
    """What was lost or done twice.

    Args:
        out: run folder.
        undisturbed: metrics of the last version without faults; ``None``: nothing is compared.
    """
    summary, books = read_json(out / "summary.json"), read_json(out / "books.json")
    if summary.get("status") != "completed":
        return [f"the run ended as {summary.get('status')}: {summary.get('reason')}"]
    config = load_any(str(out / "config.toml"))
    losses = _batches(read_jsonl(out / "batches.jsonl"), books, config.buffer.max_uses) + _books(books)
    if undisturbed is not None:
        losses += _evaluation(RunFolder(out).evals, int(books["steps"]), undisturbed)
    return losses


def _batches(rows: Sequence[Mapping[str, Any]], books: Mapping[str, Any], max_uses: int) -> list[str]:
    losses = []
    steps = [row["step"] for row in rows]
    if steps != list(range(books["steps"])):
        losses.append(f"batches.jsonl has {len(steps)} steps of {books['steps']}, {len(set(steps))} different ones")
    uses = Counter(ordinal for row in rows for ordinal in row["ordinals"])
    repeated = [ordinal for ordinal, count in uses.items() if count > max_uses]
    if repeated:
        losses.append(f"{len(repeated)} tasks were trained more than {max_uses} times, such as ordinal {repeated[0]}")
    if len(uses) != books["books"]["trained"]:
        losses.append(f"{len(uses)} tasks are in batches.jsonl, the books say {books['books']['trained']}")
    outside = [ordinal for ordinal in uses if not 0 <= ordinal < books["tasks"]["begun"]]
    if outside:
        losses.append(f"{len(outside)} trained tasks were never begun, such as ordinal {outside[0]}")
    return losses


def _books(books: Mapping[str, Any]) -> list[str]:
    losses = []
    counts, tasks, staleness = books["books"], books["tasks"], books["staleness"]
    if counts["issued"] != sum(counts.values()) - counts["issued"]:
        losses.append(f"the books do not close: {counts}")
    if tasks["begun"] != sum(tasks.values()) - tasks["begun"] or tasks["held"] or tasks["waiting"]:
        losses.append(f"a task was lost: {tasks}")
    if staleness["max"] > staleness["bound"]:
        losses.append(f"age {staleness['max']} passed the bound {staleness['bound']}")
    return losses


def _evaluation(evals: Sequence[Mapping[str, Any]], steps: int, undisturbed: Mapping[str, float]) -> list[str]:
    names = [name for name in TOLERANCE if name in undisturbed]
    if not names:
        return ["there is nothing to compare with: the undisturbed run has no evaluation of its last version"]
    if not evals or evals[-1]["version"] != steps:
        return [f"the last version ({steps}) was not evaluated, so that it cannot be compared"]
    ours = evals[-1]["metrics"]
    return [
        f"{name} ended at {ours.get(name)}, undisturbed at {undisturbed[name]}"
        for name in names
        if ours.get(name, float("-inf")) < undisturbed[name] - TOLERANCE[name]
    ]
