"""Rows of a folder that Hugging Face ``datasets`` saved (``save_to_disk``); of several splits, ``train`` is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError
from async_rl.tasks.problem import is_plain

_SPLIT = "train"


def rows(data: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read a folder.

    Args:
        data: its path.

    Yields:
        ``(where, row)``, where for messages.

    Raises:
        ConfigError: no such data set, no split ``train``, values that are not plain, or ``datasets`` is not installed.
    """
    for index, row in enumerate(_load(data)):
        where = f"{data}, row {index}"
        for column, value in row.items():
            if not is_plain(value):
                raise ConfigError(
                    f"{where}: column {column!r} holds {type(value).__name__}; keep text, numbers, lists and "
                    "structures of them, and remove the others (remove_columns)"
                )
        yield where, row


def _load(data: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"task.data = {data!r} is a folder: reading it needs Hugging Face datasets: pip install -c constraints.txt "
            "'async-rl[tasks]'"
        ) from None
    if not any((Path(data) / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise ConfigError(
            f"task.data = {data!r}: no data set that Hugging Face datasets saved is there; write it with "
            "save_to_disk, or give a JSONL file"
        )
    try:
        loaded = datasets.load_from_disk(data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"task.data = {data!r} cannot be read: {error}") from None
    if isinstance(loaded, datasets.DatasetDict):
        if _SPLIT not in loaded:
            raise ConfigError(
                f"task.data = {data!r} has no split {_SPLIT!r} (splits: {', '.join(loaded)}); save one split"
            )
        loaded = loaded[_SPLIT]
    return loaded.with_format(None)
