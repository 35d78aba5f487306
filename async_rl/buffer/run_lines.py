"""Which lines of the run's files a ledger stands by: after a resume, a recovery or a rewind the others are dropped.

batches: steps that are trained      evals: versions that are not void      samples: groups that are not made again
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from async_rl.buffer.annotating import awaited
from async_rl.buffer.files import RunFiles
from async_rl.buffer.ledger import Ledger


def batch_rows(files: RunFiles) -> list[dict[str, Any]]:
    """The steps that ``batches.jsonl`` tells of; what somebody else has written into it is left out."""
    lists = ("ordinals", "attempts", "task_indices")
    return [
        row
        for row in files.rows("batches")
        if type(row.get("step")) is int
        and all(isinstance(row.get(name), list) and all(type(n) is int for n in row[name]) for name in lists)
        and len({len(row[name]) for name in lists}) == 1
    ]


def keep_lines(files: RunFiles, ledger: Ledger) -> None:
    """Drop the lines that the run writes again.

    A server that has lost its journal waits with that for its learner, which may have a newer checkpoint.
    """
    if ledger.has_forgotten and "learner" not in ledger.notes:
        return
    steps: set[int] = set()

    def is_first(row: Mapping[str, Any]) -> bool:
        step = _number(row, "step")
        known = step in steps
        steps.add(step)
        return step < ledger.version and not known

    again = {ordinal for ordinal, *_ in ledger.retry} | ledger.open.keys()
    again |= {e.ordinal for e in ledger.scoring.values() if "reward" in awaited(e.payload, ledger.rules.stages)}
    files.keep("batches", is_first)
    files.keep("evals", lambda row: _number(row, "version") <= ledger.version)
    files.keep(
        "samples", lambda row: _number(row, "ordinal") not in again and _number(row, "ordinal") < ledger.next_ordinal
    )


def add_missing_batches(files: RunFiles, noted: Iterable[Mapping[str, Any]], ledger: Ledger) -> None:
    """Write the rows again that waited for space when the server died.

    Args:
        files: of the run.
        noted: rows of trained steps that were not on disk.
        ledger: recovered.
    """
    known = {row["step"] for row in batch_rows(files)}
    for row in noted:
        if row["step"] not in known and row["step"] < ledger.version:
            files.append("batches", row)
    files.flush()


def _number(row: Mapping[str, Any], name: str) -> int:
    """The field; 0 where it is none."""
    return row[name] if type(row.get(name)) is int else 0
