"""The ledger on disk: what a checkpoint needs so that after a crash each task is trained exactly once per use.

Ledger ─ freeze ─► Frozen ─ save ─► ledger.json (plain) + groups.bin (wire messages, length-prefixed)
Ledger ◄─ thaw ─── Frozen ◄─ load ─┘

The same pair of files is the base of the event log (:mod:`async_rl.buffer.journaled`): there clients go on with what
they hold, so ``thaw`` keeps open tickets, leases of scorers and delivered steps. At a checkpoint's resume all clients
are new: what was open is issued again, and what was delivered is ready.

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
from async_rl.buffer.fields import shown
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.records import Entry, Rules
from async_rl.data import Group
from async_rl.errors import ConfigError, SchemaError, WireError
from async_rl.form import parse
from async_rl.wire import Frame, decode_groups, encode_groups, unpack_header

SCHEMA = 5
"""Of the files here, of the messages in them (:mod:`async_rl.wire`), and of the events in a journal."""
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
    """Copy the ledger but for its memory of answers, which spares only repeated messages their true answer."""
    held = [*ledger.scoring.values(), *ledger.ready.values()]
    held += [e for entries in ledger.delivered.values() for e in entries]
    held.sort(key=lambda e: e.ordinal)
    fields = {
        "schema": SCHEMA,
        "version": ledger.version,
        "epoch": ledger.epoch,
        "next_step": ledger.next_step,
        "next_ordinal": ledger.next_ordinal,
        "abandoned": ledger.abandoned,
        "issued": ledger.issued,
        "trained": ledger.trained,
        "filtered": dict(ledger.filtered),
        "failed": dict(ledger.failed),
        "tally": ledger.tally.to_plain(),
        "retry": sorted(map(list, ledger.retry)),
        "open": [_row(e) for e in ledger.open.values()],
        "held": [_row(e) for e in held],
        "delivered": [[step, [e.ordinal for e in entries]] for step, entries in ledger.delivered.items()],
        "scoring": ledger.scoring.freeze(),
        "trained_steps": ledger.trained_steps.to_plain(),
        "heard": sorted(ledger.heard),
        "notes": dict(ledger.notes),
        "curriculum": ledger.curriculum.to_plain() if ledger.curriculum is not None else None,
    }
    return Frozen(fields, [e.payload for e in held])


def thaw(
    frozen: Frozen,
    rules: Rules,
    task_index: Callable[[int], int],
    curriculum: Curriculum | None = None,
    now: float = 0.0,
    *,
    keep_open: bool = False,
) -> Ledger:
    """A ledger as it was, see :func:`restore`."""
    ledger = Ledger(rules, task_index, curriculum)
    restore(frozen, ledger, now, keep_open=keep_open)
    return ledger


def restore(frozen: Frozen, ledger: Ledger, now: float, *, keep_open: bool) -> None:
    """Make a fresh ledger what it was.

    Args:
        frozen: what was saved.
        ledger: with the rules of the resumed run, and with a fresh curriculum if that has one: it goes on where it was.
        now: the clock.
        keep_open: the clients go on with what they hold. Otherwise what was open is failed as ``resumed`` and issued
            again first, and what was delivered is ready.

    Raises:
        ConfigError: another schema, missing fields, or groups that are not those of the books.
    """
    fields, groups = frozen.fields, frozen.groups
    _check_schema(fields)
    try:
        if [[g.ordinal, g.attempt] for g in groups] != [row[:2] for row in fields["held"]]:
            raise ConfigError(f"{_GROUPS} does not belong to its {_LEDGER}")
        _restore_counts(fields, ledger)
        for row in fields["open"]:
            entry = _entry(row, ledger.rules)
            if keep_open:
                ledger.reopen(entry)
            else:
                ledger.requeue(*entry.key, entry.task_index, entry.draw)
        for group, row in zip(groups, fields["held"], strict=True):
            entry = _entry(row, ledger.rules)
            if not keep_open:
                entry.actor, entry.issued_at = "", now
            ledger.readmit(entry, group)
        if keep_open:
            _restore_places(fields, ledger)
        if ledger.curriculum is not None:  # where the run had none so far, the plain stream was read up to here
            ledger.curriculum.restore(fields["curriculum"] or {"position": ledger.next_ordinal, "records": []})
        if not keep_open:
            ledger.resume()
        ledger.check()
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{_LEDGER} is damaged: {error!r}") from None


def _row(entry: Entry) -> list[Any]:
    return [*entry.key, entry.task_index, entry.draw, entry.version, entry.uses, entry.actor, entry.issued_at]


def _entry(row: list[Any], rules: Rules) -> Entry:
    ordinal, attempt, task_index, draw, version, uses, actor, issued_at = row
    return Entry(
        ordinal=ordinal,
        attempt=attempt,
        task_index=task_index,
        draw=draw,
        version=version,
        deadline=version + rules.max_staleness,
        uses=uses,
        actor=actor,
        issued_at=issued_at,
    )


def _restore_counts(fields: dict[str, Any], ledger: Ledger) -> None:
    ledger.version = ledger.next_step = int(fields["version"])
    ledger.epoch = int(fields["epoch"])
    ledger.next_ordinal, ledger.abandoned = int(fields["next_ordinal"]), int(fields["abandoned"])
    ledger.issued, ledger.trained = int(fields["issued"]), int(fields["trained"])
    ledger.filtered.update(fields["filtered"])
    ledger.failed.update(fields["failed"])
    ledger.tally.update(fields["tally"])
    ledger.retry = [(o, a, t, d) for o, a, t, d in fields["retry"]]
    ledger.trained_steps.restore(fields["trained_steps"])
    ledger.heard.update(fields["heard"])


def _restore_places(fields: dict[str, Any], ledger: Ledger) -> None:
    """What only clients that go on have to do with: delivered steps, leases of scorers, facts of the service."""
    ledger.next_step = int(fields["next_step"])
    for step, ordinals in fields["delivered"]:
        ledger.delivered[step] = [ledger.ready.pop(ordinal) for ordinal in ordinals]
    ledger.scoring.restore(fields["scoring"])
    ledger.notes.update(fields["notes"])


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


def is_in(folder: Path) -> bool:
    """Whether both files are there."""
    return (folder / _LEDGER).is_file() and (folder / _GROUPS).is_file()


def load(folder: Path) -> Frozen:
    """Read what :func:`save` wrote.

    Raises:
        ConfigError: a file is missing, cut short or malformed; names it.
    """
    try:
        fields = parse((folder / _LEDGER).read_bytes())
        if not isinstance(fields, dict):
            raise ConfigError(f"cannot resume from {folder}: {_LEDGER} is no JSON object")
        _check_schema(fields)  # before the groups, which are in the form of that schema
        with open(folder / _GROUPS, "rb") as file:
            groups = [g for frames in _read_messages(file) for g in decode_groups(unpack_header(frames[0]), frames[1:])]
    except OSError as error:
        raise ConfigError(f"cannot resume from {folder}: {error}") from None
    except (ValueError, WireError, struct.error) as error:
        raise ConfigError(f"cannot resume from {folder}: a file of the ledger is damaged ({error})") from None
    return Frozen(fields, groups)


def _check_schema(fields: dict[str, Any]) -> None:
    if fields.get("schema") != SCHEMA:
        raise SchemaError(
            f"{_LEDGER} has schema {shown(fields.get('schema'), 20)}, this version reads {SCHEMA}: go on with the "
            "version of async-rl that wrote it"
        )


def _write_message(file: BinaryIO, frames: list[Frame]) -> None:
    file.write(_U64.pack(len(frames)))
    for frame in frames:
        file.write(_U64.pack(len(frame)))
        file.write(frame)


def _read_messages(file: BinaryIO) -> Iterator[list[Frame]]:
    size = os.fstat(file.fileno()).st_size
    while head := file.read(_U64.size):
        (count,) = _U64.unpack(head)
        frames: list[Frame] = []
        for _ in range(count):
            (length,) = _U64.unpack(file.read(_U64.size))
            if length > size - file.tell():  # before it is believed: memory of that size is asked for at once
                raise ValueError(f"{_GROUPS} is cut short")
            frames.append(file.read(length))
        if not frames:
            raise ValueError(f"an empty message in {_GROUPS}")
        yield frames


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
