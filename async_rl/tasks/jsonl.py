"""Problems from a JSONL file: one JSON object a line, with a ``prompt`` and whatever columns the verifier needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError
from async_rl.tasks.problem import Problem

_RESERVED = ("completions", "completion_ids", "finish_reasons", "prompts")
"""Keyword arguments of a verifier that are ours."""


def problems(data: str, needs_answer: bool) -> Iterator[tuple[object, Problem]]:
    """Read ``data``; blank lines are skipped.

    Args:
        data: path of the file.
        needs_answer: whether answers are scored by exact match with an ``answer`` column.

    Yields:
        ``(key, problem)``: rows with the same prompt share a key.

    Raises:
        ConfigError: no such file, no rows, or a row that is not like the first one; names the line.
    """
    columns: frozenset[str] | None = None
    for number, line in _lines(data):
        row = _parse(line, f"{data}, line {number}")
        if columns is None:
            columns = frozenset(row)
            _check_columns(columns, data, needs_answer)
        elif row.keys() != columns:
            names = ", ".join(sorted(row.keys() ^ columns))
            raise ConfigError(f"{data}, line {number}: columns differ from the first row's ({names})")
        prompt = row.pop("prompt")
        yield prompt, Problem(prompt=prompt, columns=row)
    if columns is None:
        raise ConfigError(f"task.data = {data!r}: the file holds no problems")


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
    prompt = row["prompt"]
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"{where}: 'prompt' must be text that is not empty, got {prompt!r:.60}")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: 'prompt' holds half of a surrogate pair, which no tokenizer can read") from None
    return row


def _check_columns(columns: frozenset[str], data: str, needs_answer: bool) -> None:
    for name in _RESERVED:
        if name in columns:
            raise ConfigError(f"{data}: rename the column {name!r}: a verifier gets the sampled ones under this name")
    if needs_answer and "answer" not in columns:
        raise ConfigError(
            f"{data}: no 'answer' column (columns: {', '.join(sorted(columns))}); add one for exact match, or set "
            "task.verifier = 'module:function'"
        )
