"""Problems from rows of a user's data: a ``prompt``, and whatever columns the verifier needs.

    JSONL file ──► jsonl.rows  ──┐
                                 ├──► problems: every row like the first, prompts that can be asked
    data folder ─► folder.rows ──┘

A prompt is text, or with ``task.chat`` a list of messages ``{"role": ..., "content": ...}`` that ends with the user's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError
from async_rl.tasks import folder, jsonl
from async_rl.tasks.problem import Message, Problem

_RESERVED = ("completions", "completion_ids", "finish_reasons", "prompts")
"""Keyword arguments of a verifier that are ours."""
_ROLES = ("system", "user", "assistant", "tool")


def problems(data: str, *, needs_answer: bool, chat: bool) -> Iterator[tuple[object, Problem]]:
    """Read ``data``.

    Args:
        data: path of a JSONL file, or of a folder that Hugging Face ``datasets`` saved.
        needs_answer: whether answers are scored by exact match with an ``answer`` column.
        chat: whether prompts may be lists of messages.

    Yields:
        ``(key, problem)``: rows with the same prompt share a key.

    Raises:
        ConfigError: no such data, no rows, or a row that is not like the first one; names the row.
    """
    columns: frozenset[str] | None = None
    for where, row in folder.rows(data) if Path(data).is_dir() else jsonl.rows(data):
        if columns is None:
            columns = frozenset(row)
            _check_columns(columns, data, needs_answer)
        elif row.keys() != columns:
            names = ", ".join(sorted(row.keys() ^ columns))
            raise ConfigError(f"{where}: columns differ from the first row's ({names})")
        if needs_answer:
            _check_answer(row["answer"], where)
        yield _problem(row, where, chat)
    if columns is None:
        raise ConfigError(f"task.data = {data!r} holds no problems")


def _problem(row: dict[str, Any], where: str, chat: bool) -> tuple[object, Problem]:
    prompt = row.pop("prompt")
    if not isinstance(prompt, list):
        _check_text(prompt, where)
        return prompt, Problem(prompt=prompt, columns=row)
    if not chat:
        raise ConfigError(f"{where}: 'prompt' is a list of messages; set task.chat = true, or make it text")
    messages = tuple(_message(message, where) for message in prompt)
    if not messages or messages[-1]["role"] != "user":
        raise ConfigError(f"{where}: the last message of 'prompt' must be the user's (role 'user')")
    return json.dumps(messages), Problem(prompt=messages[-1]["content"], columns=row, before=messages[:-1])


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or message.keys() != {"role", "content"} or message["role"] not in _ROLES:
        raise ConfigError(
            f"{where}: a message of 'prompt' must be {{'role': one of {', '.join(_ROLES)}, 'content': text}}, got "
            f"{message!r:.80}"
        )
    _check_text(message["content"], where)
    return {"role": message["role"], "content": message["content"]}


def _check_text(prompt: Any, where: str) -> None:
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"{where}: 'prompt' must be text that is not empty, got {prompt!r:.60}")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: 'prompt' holds half of a surrogate pair, which no tokenizer can read") from None


def _check_answer(answer: Any, where: str) -> None:
    """Refuse what exact match would compare with by accident: ``None``, nothing at all, a list, nan."""
    if isinstance(answer, int) or (isinstance(answer, str) and answer.strip()):
        return
    if isinstance(answer, float) and math.isfinite(answer):
        return
    raise ConfigError(
        f"{where}: 'answer' is {answer!r:.60}; exact match needs text that is not blank, or a number; correct or "
        "remove the row, or set task.verifier = 'module:function'"
    )


def _check_columns(columns: frozenset[str], data: str, needs_answer: bool) -> None:
    names = ", ".join(sorted(columns)) or "none"
    if "prompt" not in columns:
        raise ConfigError(f"{data}: no 'prompt' column (columns: {names})")
    for name in _RESERVED:
        if name in columns:
            raise ConfigError(f"{data}: rename the column {name!r}: a verifier gets the sampled ones under this name")
    if needs_answer and "answer" not in columns:
        raise ConfigError(
            f"{data}: no 'answer' column (columns: {names}); add one for exact match, or set "
            "task.verifier = 'module:function'"
        )
