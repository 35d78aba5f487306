"""The files that the server writes into the run folder; the table is in ``docs/architecture.md``.

one object, replaced atomically: server.json, books.json        one line an event: *.jsonl
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from async_rl.errors import ConfigError

LINE_FILES = ("batches", "timeline", "evals", "samples")


class RunFiles:
    """Open for the life of the server.

    Args:
        out: run folder; made if missing.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, out: Path) -> None:
        self.out = out.resolve()
        self._open: dict[str, TextIO] = {}
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            for name in LINE_FILES:
                self._open[name] = open(self._path(name), "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot write the run folder {out}: {error}") from None

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Add a line to ``NAME.jsonl``; it is on disk after the next :meth:`flush`."""
        self._open[name].write(_json(row) + "\n")

    def flush(self) -> None:
        """Hand all lines to the operating system."""
        for file in self._open.values():
            file.flush()

    def replace(self, name: str, content: Mapping[str, Any]) -> None:
        """Write ``NAME.json`` so that a reader sees the old or the new content, never a part."""
        path = self.out / f"{name}.json"
        part = path.with_suffix(".json.part")
        part.write_text(_json(content) + "\n", encoding="utf-8")
        os.replace(part, path)

    def keep(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop lines of ``NAME.jsonl`` that a resumed run writes again, and a last one that a crash cut short."""
        lines = []
        # not splitlines(): the text of a sample may hold other line separators, such as U+2028
        for line in self._path(name).read_text(encoding="utf-8").split("\n"):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and wanted(row):
                lines.append(line + "\n")
        self._open[name].close()
        part = self._path(name).with_suffix(".jsonl.part")
        part.write_text("".join(lines), encoding="utf-8")
        os.replace(part, self._path(name))
        self._open[name] = open(self._path(name), "a", encoding="utf-8")  # noqa: SIM115

    def inside(self, path: str) -> Path | None:
        """The path, if it lies inside the run folder."""
        resolved = (self.out / path).resolve()
        return resolved if resolved.is_relative_to(self.out) and resolved != self.out else None

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()

    def _path(self, name: str) -> Path:
        return self.out / f"{name}.jsonl"


def _json(row: Mapping[str, Any]) -> str:
    """JSON of whatever a client sent: what JSON has no type for is written as text."""
    return json.dumps(row, default=str, skipkeys=True, ensure_ascii=False)
