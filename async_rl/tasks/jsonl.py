"""Rows of a JSONL file: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError


def rows(data: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read a file; blank lines are skipped.

    Args:
        data: its path.

    Yields:
        ``(where, row)``, where for messages.

    Raises:
        ConfigError: no such file, or a line that is no JSON object; names the line.
    """
    for number, line in _lines(data):
        where = f"{data}, line {number}"
        yield where, _parse(line, where)


def _lines(data: str) -> Iterator[tuple[int, str]]:
    try:
        text = Path(data).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"task.data = {data!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"task.data = {data!r} is not UTF-8 text: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f'{where}: expected a JSON object like {{"prompt": ..., "answer": ...}}, got {line[:60]!r}')
    if "prompt" not in row:
        raise ConfigError(f"{where}: no 'prompt' column (columns: {', '.join(sorted(row)) or 'none'})")
    return row
