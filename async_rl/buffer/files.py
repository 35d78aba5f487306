"""The files that the server writes into the run folder; the table is in ``docs/architecture.md``.

one object, replaced atomically: server.json, books.json        one line an event: *.jsonl

A full disk or an unwritable folder never ends the server: what cannot be written waits in memory, ``trouble`` says so,
and every flush tries again. Of what waits, only old lines of telemetry are ever dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_rl.buffer.line_file import LineFile
from async_rl.errors import ConfigError

LINE_FILES = ("batches", "timeline", "evals", "samples")
TELEMETRY = ("timeline", "samples")
"""Files whose oldest lines may be dropped while the disk is full."""
MOST_TELEMETRY = 16 << 20
"""Bytes of each of them that wait in memory at most."""


class RunFiles:
    """Open for the life of the server.

    Args:
        out: run folder; made if missing.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, out: Path) -> None:
        self.out = out.resolve()
        self.trouble = ""
        """A sentence while something could not be written; empty while all is well."""
        self._lines: dict[str, LineFile] = {}
        self._objects: dict[str, bytes] = {}
        """Content of ``NAME.json`` that could not be written."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            for name in LINE_FILES:
                most = MOST_TELEMETRY if name in TELEMETRY else None
                self._lines[name] = LineFile(self.out / f"{name}.jsonl", most)
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot write the run folder {out}: {error}") from None

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Add a line to ``NAME.jsonl``; it is on disk after the next :meth:`flush` that succeeds."""
        self._lines[name].append(_json(row))

    def flush(self) -> None:
        """Hand all that waits to the operating system, as far as it takes it."""
        attempts: list[Callable[[], None]] = [file.write for file in self._lines.values()]
        attempts += [lambda name=name: self._write_object(name) for name in list(self._objects)]  # type: ignore[misc]
        self._try(*attempts)

    def replace(self, name: str, content: Mapping[str, Any]) -> None:
        """Write ``NAME.json`` so that a reader sees the old or the new content, never a part."""
        self._objects[name] = (_json(content) + "\n").encode("utf-8", "replace")
        self._try(lambda: self._write_object(name))

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The lines of ``NAME.jsonl``, those included that wait for space."""
        return self._lines[name].rows()

    def keep(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the lines of ``NAME.jsonl`` that the run writes again, and a last one that a crash cut short."""
        self._try(lambda: self._lines[name].keep(wanted))

    def mend(self, name: str) -> None:
        """Drop a last line of ``NAME.jsonl`` that a crash cut short, and nothing else."""
        self._try(self._lines[name].mend)

    def inside(self, path: str) -> Path | None:
        """The path, if it lies inside the run folder."""
        if "\0" in path:
            return None
        resolved = (self.out / path).resolve()
        return resolved if resolved.is_relative_to(self.out) and resolved != self.out else None

    def close(self) -> None:
        """Close all files. Closing again does nothing."""
        for file in self._lines.values():
            file.close()
        self._lines.clear()

    def _write_object(self, name: str) -> None:
        path = self.out / f"{name}.json"
        part = path.with_suffix(".json.part")
        try:
            part.write_bytes(self._objects[name])
            os.replace(part, path)
        except OSError:
            with suppress(OSError):  # the first error is the one to report
                part.unlink(missing_ok=True)
            raise
        del self._objects[name]

    def _try(self, *attempts: Callable[[], None]) -> None:
        """Do each; what fails is said once, and the end of it, too."""
        errors = []
        for attempt in attempts:
            try:
                attempt()
            except OSError as error:
                errors.append(error)
        if errors:
            self._begin_trouble(errors[0])
        elif self.trouble and not self._objects and not any(file.waiting for file in self._lines.values()):
            self._end_trouble()

    def _begin_trouble(self, error: OSError) -> None:
        waiting = sum(file.waiting for file in self._lines.values())
        sentence = f"cannot write the run folder {self.out}: {error.strerror}; the run goes on"
        if not self.trouble:
            print(f"async-rl: warning: {sentence}, its files wait in memory: make space", flush=True)
        self.trouble = f"{sentence}, {waiting} lines wait in memory: make space"

    def _end_trouble(self) -> None:
        self.trouble = ""
        dropped = sum(file.dropped for file in self._lines.values())
        lost = f"; {dropped} lines of telemetry were dropped" if dropped else ""
        print(f"the run folder {self.out} can be written again: all that waited is in its files{lost}", flush=True)
        for file in self._lines.values():
            file.dropped = 0


def _json(row: Mapping[str, Any]) -> str:
    """JSON of whatever a client sent: what JSON has no type for is written as text."""
    return json.dumps(row, default=str, skipkeys=True, ensure_ascii=False)
