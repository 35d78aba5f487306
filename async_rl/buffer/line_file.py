"""One file of JSON lines that outlives a full disk: what cannot be written waits in memory, in order, and is not lost.

append ─► waiting ─ write ─► file          the disk is full: it stays in waiting, the next write goes on from there
keep ─► the wanted lines ─ write ─► file   a prefix of the old ones: cut off in place, which needs no space

A line that the full disk cut in two is completed by the rest, which is the first thing that waits.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_TAIL = 1 << 16


class LineFile:
    """Open for the life of the server.

    Args:
        path: made if missing.
        most_waiting: bytes that may wait; beyond it the oldest lines are dropped. ``None``: none ever is.

    Raises:
        OSError: it cannot be opened for writing.
    """

    def __init__(self, path: Path, most_waiting: int | None = None) -> None:
        self._path = path
        self._most_waiting = most_waiting
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._begun = False
        """The first of what waits is the rest of a line that is in the file already."""
        self._wanted: bytes | None = None
        """What is to stand in the file in place of what does, once that can be written."""
        self.dropped = 0
        """Lines that were given up because too much waited."""
        self._descriptor = self._open()

    @property
    def waiting(self) -> int:
        """Lines that are not in the file yet, and one more while the file is to be exchanged."""
        return len(self._waiting) + (self._wanted is not None)

    def append(self, line: str) -> None:
        """Add a line, without its end; it is written by :meth:`write`."""
        data = (line + "\n").encode("utf-8", "replace")
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        while self._most_waiting is not None and self._waiting_bytes > self._most_waiting and len(self._waiting) > 1:
            self._drop_oldest()

    def write(self) -> None:
        """Write what waits.

        Raises:
            OSError: not all of it could be written; the rest still waits.
        """
        if self._wanted is not None:
            self._replace(self._wanted)
            self._wanted = None
        while self._waiting:
            data = b"".join(self._waiting)
            self._written(os.write(self._descriptor, data))

    def rows(self) -> list[dict[str, Any]]:
        """All lines that are objects, those that wait included; one that a crash cut short is left out."""
        return [row for _, row in self._lines()]

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop all lines but the wanted ones.

        Raises:
            OSError: it could not be done yet; :meth:`write` tries again.
        """
        self._wanted = b"".join(line + b"\n" for line, row in self._lines() if wanted(row))
        self._waiting.clear()
        self._waiting_bytes, self._begun = 0, False
        self.write()

    def mend(self) -> None:
        """Cut off a last line that a crash cut short, without reading the whole file.

        Raises:
            OSError: it cannot be read or written.
        """
        size = os.path.getsize(self._path)
        with open(self._path, "rb") as file:
            end = size
            while end > 0:
                begin = max(0, end - _TAIL)
                file.seek(begin)
                found = file.read(end - begin).rfind(b"\n")
                if found >= 0:
                    end = begin + found + 1
                    break
                end = begin
        if end < size:
            os.ftruncate(self._descriptor, end)

    def close(self) -> None:
        """Close it; what still waits is lost."""
        os.close(self._descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _lines(self) -> list[tuple[bytes, dict[str, Any]]]:
        content = self._wanted if self._wanted is not None else self._path.read_bytes()
        found = []
        for line in b"".join([content, *self._waiting]).split(b"\n"):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                found.append((line, row))
        return found

    def _replace(self, content: bytes) -> None:
        if self._path.read_bytes().startswith(content):
            os.ftruncate(self._descriptor, len(content))
            return
        part = self._path.with_suffix(".jsonl.part")
        try:
            part.write_bytes(content)
            os.replace(part, self._path)
        except OSError:
            with suppress(OSError):  # the first error is the one to report
                part.unlink(missing_ok=True)
            raise
        old, self._descriptor = self._descriptor, self._open()
        os.close(old)

    def _written(self, count: int) -> None:
        """Take ``count`` bytes from the front of what waits."""
        self._waiting_bytes -= count
        while count and count >= len(self._waiting[0]):
            count -= len(self._waiting.popleft())
            self._begun = False
        if count:
            self._waiting[0] = self._waiting[0][count:]
            self._begun = True

    def _drop_oldest(self) -> None:
        """The rest of a line that has begun stays: without it the file would hold half a line."""
        first = self._waiting.popleft()
        if self._begun:
            second = self._waiting.popleft()
            self._waiting.appendleft(first)
            first = second
        self._waiting_bytes -= len(first)
        self.dropped += 1
