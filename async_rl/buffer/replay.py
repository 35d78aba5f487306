"""The ledger of a server that died, from its journal.

newest base ─► restore ─► each event: the same method, the same arguments ─► what it said is the same, too
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from async_rl.buffer import event_log
from async_rl.buffer.curriculum import Curriculum
from async_rl.buffer.fields import shown
from async_rl.buffer.journal import restore
from async_rl.buffer.journaled import JournaledLedger, summary
from async_rl.buffer.records import Rules
from async_rl.buffer.undo import Undone
from async_rl.errors import ConfigError, WireError
from async_rl.wire import LIMITS, Frame, decode_annotations, decode_groups, unpack_header

_LIMITS = replace(LIMITS, header_bytes=4 * LIMITS.header_bytes)
"""A header that a client may send, and what an event adds to it."""
_PLAIN = frozenset(
    {
        *("waste", "fail", "lose", "expire", "recall", "lease", "fail_stage", "lose_scorer"),
        *("deliver", "train", "close", "note", "rejoin"),
    }
)
"""Events whose arguments are plain types."""


def recover(
    folder: Path,
    rules: Rules,
    task_index: Callable[[int], int],
    curriculum: Curriculum | None,
    now: float,
) -> JournaledLedger:
    """The ledger of a server that died, as it was when it last answered; its log goes on.

    Args:
        folder: ``RUN/journal``.
        rules: the same as then.
        task_index: the task of an ordinal, the same as then.
        curriculum: a fresh one, if the run has one.
        now: the clock.

    Raises:
        ConfigError: there is no log, or it is damaged, or of other rules.
    """
    frozen, records = event_log.read(folder)
    ledger = JournaledLedger(rules, task_index, curriculum)
    restore(frozen, ledger, now, keep_open=True)
    for number, frames in enumerate(records):
        try:
            _repeat(ledger, frames)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, WireError) as error:
            raise ConfigError(f"event {number} of the journal in {folder} does not fit: {error!r}") from error
    ledger.attach(event_log.reopen(folder))
    ledger.rejoin(now)
    return ledger


def _repeat(ledger: JournaledLedger, frames: Sequence[Frame]) -> None:
    header = unpack_header(frames[0], _LIMITS)
    event, args = header["type"], header["args"]
    if event == "issue":
        tickets = [ledger.issue(*row) for row in args["rows"]]
        if [summary(ticket) for ticket in tickets] != header["said"]:
            raise ValueError(f"other tickets were issued than {shown(header['said'])}")
        return
    if event == "submit":
        (group,) = decode_groups(header, frames[1:])
        result: object = ledger.submit(group=group, **args)
    elif event == "annotate":
        (annotation,) = decode_annotations(header, frames[1:])
        result = ledger.annotate(annotation=annotation, **args)
    elif event == "rewind":
        result = ledger.rewind(args["step"], [Undone(*row) for row in args["undone"]])
    elif event in _PLAIN:
        result = getattr(ledger, event)(**args)
    else:
        raise ValueError(f"there is no event {event!r}")
    if summary(result) != header["said"]:
        raise ValueError(f"{event} said {header['said']}, and now {summary(result)}")
