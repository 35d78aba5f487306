"""Reading a run folder: the files that the processes of a run leave, tolerant of a run that is cut off or goes on.

DIR ─► run_forms ─► RunFolder ─► summary.py, trace.py, report/          (who writes which file: docs/architecture.md)

What has not the expected form is left out (:mod:`async_rl.run_forms`): no content of a file can end its reader.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl import run_forms
from async_rl.form import Form, parse

Row = dict[str, Any]

CHECKPOINT_FILES = ("trainer.json", "optimizer.safetensors", "ledger.json", "groups.bin")
"""A checkpoint folder counts only when both sides have written theirs."""
MODEL_FILES = ("hf/config.json", "adapter/adapter_config.json", "policy.safetensors")
"""It has one of these, too: of a language model, of its adapter, or of a policy that controls environments."""


def read_json(path: Path) -> Row:
    """The object in a JSON file; empty when there is no such file, or it is cut off or damaged."""
    try:
        loaded = parse(path.read_bytes())
    except FileNotFoundError:
        return {}
    return loaded if isinstance(loaded, dict) else {}


def read_jsonl(path: Path) -> list[Row]:
    """The objects of a JSON-lines file in order; a line that a crash cut off, or that is damaged, is left out."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as lines:
        return [row for line in lines if isinstance(row := parse(line), dict)]


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new one, never a half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def model_folder(checkpoint: Path) -> Path:
    """Where a checkpoint has its model: a language model, its adapter alone, or (control) beside everything else."""
    return next((folder for name in ("hf", "adapter") if (folder := checkpoint / name).is_dir()), checkpoint)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder; every read goes to disk, so a running run shows its present state."""

    path: Path

    @property
    def server(self) -> Row:
        """``address``, ``pid`` and ``run_id`` of the server that serves it, or served it last."""
        return run_forms.SERVER(read_json(self.path / "server.json")) or {}

    @property
    def books(self) -> Row:
        """State of the ledger after the last step, with reasons, staleness, token counts and clients."""
        return run_forms.BOOKS(read_json(self.path / "books.json")) or {}

    @property
    def summary(self) -> Row:
        """The contract file; empty while the run goes on."""
        return run_forms.SUMMARY(read_json(self.path / "summary.json")) or {}

    @property
    def metrics(self) -> list[Row]:
        """One row a step, rising in ``step``."""
        return self._rows("metrics", run_forms.metrics_row)

    @property
    def evals(self) -> list[Row]:
        """Held-out evaluations: the last row of each version, in order of version."""
        latest = {row["version"]: row for row in self._rows("evals", run_forms.EVAL)}
        return [latest[version] for version in sorted(latest)]

    @property
    def timeline(self) -> list[Row]:
        """Heartbeats: ``name``, ``role``, ``spans`` [[state, start, end]] in epoch seconds."""
        return self._rows("timeline", run_forms.BEAT)

    @property
    def samples(self) -> list[Row]:
        """Some groups as text."""
        return self._rows("samples", run_forms.SAMPLE)

    @property
    def config_text(self) -> str:
        """The resolved configuration as TOML, empty when there is none."""
        path = self.path / "config.toml"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def _rows(self, name: str, form: Form) -> list[Row]:
        return [row for raw in read_jsonl(self.path / f"{name}.jsonl") if (row := form(raw)) is not None]

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, the one of the highest step first."""
        found: list[tuple[int, Path]] = []
        for folder in self.path.glob("checkpoints/step_*"):
            match = re.fullmatch(r"step_(\d+)", folder.name)
            whole = all((folder / name).is_file() for name in CHECKPOINT_FILES)
            if match and whole and any((folder / name).is_file() for name in MODEL_FILES):
                found.append((int(match[1]), folder))
        return [folder for _, folder in sorted(found, reverse=True)]

    def latest_checkpoint(self) -> Path | None:
        """The complete checkpoint of the highest step, or ``None``."""
        return next(iter(self.checkpoints()), None)
