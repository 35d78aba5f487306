"""The ledger on disk: what a checkpoint needs so that after a crash each task is trained exactly once per use.

Ledger ─ freeze ─► Frozen ─ save ─► ledger.json (plain) + groups.bin (wire messages, length-prefixed)
Ledger ◄─ thaw ─── Frozen ◄─ load ─┘

groups.bin = { number of frames u64 | { length u64 | bytes } × frames } × groups        little-endian
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from async_rl.buffer.curriculum import Curriculum
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.records import Rules
from async_rl.data import Group
from async_rl.errors import ConfigError, WireError
from async_rl.wire import Frame, decode_groups, encode_groups, unpack_header

SCHEMA = 3
_LEDGER, _GROUPS = "ledger.json", "groups.bin"
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Frozen:
    """A ledger at one moment; it shares the immutable groups with the living one."""

    fields: dict[str, Any]
    """Plain types."""
    groups: list[Group]
    """Those in scoring, ready, and delivered but untrained, in ordinal order; what a group has tells what it awaits."""


def freeze(ledger: Ledger) -> Frozen:
    """Copy the books and the frontier; what is delivered but untrained counts as ready."""
    held = [*ledger.scoring.values(), *ledger.ready.values()]
    held += [e for entries in ledger.delivered.values() for e in entries]
    held.sort(key=lambda e: e.ordinal)
    fields = {
        "schema": SCHEMA,
        "version": ledger.version,
        "next_ordinal": ledger.next_ordinal,
        "issued": ledger.issued,
        "trained": ledger.trained,
        "filtered": dict(ledger.filtered),
        "failed": dict(ledger.failed),
        "tally": ledger.tally.to_plain(),
        "retry": sorted(map(list, ledger.retry)),
        "open": sorted([*e.key, e.task_index] for e in ledger.open.values()),
        "held": [[*e.key, e.version, e.uses] for e in held],
        "curriculum": ledger.curriculum.to_plain() if ledger.curriculum is not None else None,
    }
    return Frozen(fields, [e.payload for e in held])


def thaw(
    frozen: Frozen,
    rules: Rules,
    task_index: Callable[[int], int],
    curriculum: Curriculum | None = None,
    now: float = 0.0,
) -> Ledger:
    """The ledger as it was; what was open is failed as ``resumed`` and issued again first.

    Args:
        frozen: what was saved.
        rules: of the resumed run.
        task_index: the task of an ordinal.
        curriculum: a fresh one, if the resumed run has one; it goes on where it was.
        now: the clock.

    Raises:
        ConfigError: another schema, missing fields, or groups that are not those of the books.
    """
    fields, groups = frozen.fields, frozen.groups
    if fields.get("schema") != SCHEMA:
        raise ConfigError(
            f"the checkpoint's {_LEDGER} has schema {fields.get('schema')!r}, this version reads {SCHEMA}"
        )
    try:
        if [[g.ordinal, g.attempt] for g in groups] != [row[:2] for row in fields["held"]]:
            raise ConfigError(f"the checkpoint's {_GROUPS} does not belong to its {_LEDGER}")
        ledger = Ledger(rules, task_index, curriculum)
        ledger.version = ledger.next_step = int(fields["version"])
        ledger.next_ordinal = int(fields["next_ordinal"])
        ledger.issued, ledger.trained = int(fields["issued"]), int(fields["trained"])
        ledger.filtered.update(fields["filtered"])
        ledger.failed.update(fields["failed"])
        ledger.tally.update(fields["tally"])
        ledger.retry = [(o, a, t) for o, a, t in fields["retry"]]
        for ordinal, attempt, index in fields["open"]:
            ledger.requeue(ordinal, attempt, index)
        for group, (_, _, version, uses) in zip(groups, fields["held"], strict=True):
            ledger.readmit(group, version, uses, now)
        if curriculum is not None:  # where the run had none so far, the plain stream was read up to here
            curriculum.restore(fields["curriculum"] or {"position": ledger.next_ordinal, "records": []})
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the checkpoint's {_LEDGER} is damaged: {error!r}") from None
    ledger.resume()
    return ledger


def save(frozen: Frozen, folder: Path) -> None:
    """Write both files and make them durable (fsync of files and folder)."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _GROUPS, "wb") as file:
        for group in frozen.groups:
            _write_message(file, encode_groups("group", [group]))
        _sync(file)
    with open(folder / _LEDGER, "wb") as file:
        file.write(json.dumps(frozen.fields).encode())
        _sync(file)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(folder: Path) -> Frozen:
    """Read what :func:`save` wrote.

    Raises:
        ConfigError: a file is missing, cut short or malformed; names it.
    """
    try:
        fields = json.loads((folder / _LEDGER).read_bytes())
        with open(folder / _GROUPS, "rb") as file:
            groups = [g for frames in _read_messages(file) for g in decode_groups(unpack_header(frames[0]), frames[1:])]
    except OSError as error:
        raise ConfigError(f"cannot resume from {folder}: {error}") from None
    except (ValueError, WireError, struct.error) as error:
        raise ConfigError(f"cannot resume from {folder}: a file of the ledger is damaged ({error})") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"cannot resume from {folder}: {_LEDGER} is not an object")
    return Frozen(fields, groups)


def _write_message(file: BinaryIO, frames: list[Frame]) -> None:
    file.write(_U64.pack(len(frames)))
    for frame in frames:
        file.write(_U64.pack(len(frame)))
        file.write(frame)


def _read_messages(file: BinaryIO) -> Iterator[list[Frame]]:
    while head := file.read(_U64.size):
        (count,) = _U64.unpack(head)
        frames: list[Frame] = []
        for _ in range(count):
            (length,) = _U64.unpack(file.read(_U64.size))
            frame = file.read(length)
            if len(frame) != length:
                raise ValueError(f"{_GROUPS} is cut short")
            frames.append(frame)
        if not frames:
            raise ValueError(f"an empty message in {_GROUPS}")
        yield frames


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
