"""Reading a run folder: the files that the processes of a run leave, tolerant of a run that is cut off or goes on.

DIR ─► RunFolder ─► summary.py, trace.py, report/          (who writes which file: docs/architecture.md)
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

CHECKPOINT_FILES = ("trainer.json", "optimizer.safetensors", "ledger.json", "groups.bin")
"""A checkpoint folder counts only when both sides have written theirs."""
MODEL_FILES = ("hf/config.json", "policy.safetensors")
"""It has one of these, too: of a language model, or of a policy that controls environments."""


def read_json(path: Path) -> Row:
    """The object in a JSON file; empty when there is no such file, or it is cut off or damaged."""
    try:
        loaded = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def read_jsonl(path: Path) -> list[Row]:
    """The objects of a JSON-lines file in order; a line that a crash cut off is left out."""
    if not path.is_file():
        return []
    rows: list[Row] = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                rows.append(row)
    return rows


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new one, never a half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder; every read goes to disk, so a running run shows its present state."""

    path: Path

    @property
    def books(self) -> Row:
        """State of the ledger after the last step, with reasons, staleness, token counts and clients."""
        return read_json(self.path / "books.json")

    @property
    def summary(self) -> Row:
        """The contract file; empty while the run goes on."""
        return read_json(self.path / "summary.json")

    @property
    def metrics(self) -> list[Row]:
        """One row a step, rising in ``step``."""
        return read_jsonl(self.path / "metrics.jsonl")

    @property
    def evals(self) -> list[Row]:
        """Held-out evaluations: the last row of each version, in order of version."""
        latest = {int(row["version"]): row for row in read_jsonl(self.path / "evals.jsonl") if "version" in row}
        return [latest[version] for version in sorted(latest)]

    @property
    def timeline(self) -> list[Row]:
        """Heartbeats: ``name``, ``role``, ``spans`` [[state, start, end]] in epoch seconds."""
        return read_jsonl(self.path / "timeline.jsonl")

    @property
    def samples(self) -> list[Row]:
        """Some groups as text."""
        return read_jsonl(self.path / "samples.jsonl")

    @property
    def config_text(self) -> str:
        """The resolved configuration as TOML, empty when there is none."""
        path = self.path / "config.toml"
        return path.read_text() if path.is_file() else ""

    def latest_checkpoint(self) -> Path | None:
        """The complete checkpoint of the highest step, or ``None``."""
        found: list[tuple[int, Path]] = []
        for folder in self.path.glob("checkpoints/step_*"):
            match = re.fullmatch(r"step_(\d+)", folder.name)
            whole = all((folder / name).is_file() for name in CHECKPOINT_FILES)
            if match and whole and any((folder / name).is_file() for name in MODEL_FILES):
                found.append((int(match[1]), folder))
        return max(found)[1] if found else None
