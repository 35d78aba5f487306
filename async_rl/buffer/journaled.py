"""A ledger that a server's death does not harm: what changes it is on record before anyone is answered.

message ─► JournaledLedger.submit ─► Ledger.submit ─► did it change? ─► EventLog.append ─► answer
turn of the server's loop: with batch(): messages, tickets, deliveries ─► one write ─► all answers
recover: newest base ─► restore ─► each event: the same method, the same arguments ─► what it said is the same, too

The clock is part of the arguments: ``time.monotonic()``, which goes on over a process's death.
"""

# ruff: noqa: D102    (the methods are documented in Ledger)

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_rl.buffer import event_log
from async_rl.buffer.curriculum import Curriculum
from async_rl.buffer.event_log import EventLog
from async_rl.buffer.journal import freeze, restore
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.records import Answer, Delivery, Lost, Rules
from async_rl.buffer.undo import Undone
from async_rl.data import Annotation, Group
from async_rl.errors import ConfigError, WireError
from async_rl.protocol import Ticket
from async_rl.wire import (
    LIMITS,
    Frame,
    decode_annotations,
    decode_groups,
    encode_annotations,
    encode_groups,
    pack_header,
    unpack_header,
)


class JournaledLedger(Ledger):
    """A ledger with an event log, from :meth:`attach` on. Methods are documented in :class:`Ledger`."""

    def __init__(self, rules: Rules, task_index: Callable[[int], int], curriculum: Curriculum | None = None) -> None:
        super().__init__(rules, task_index, curriculum)
        self._log: EventLog | None = None
        self._in_batch = False

    def attach(self, log: EventLog) -> None:
        """Write down what changes from now on."""
        self._log = log

    @property
    def is_recorded(self) -> bool:
        """Whether a server that died now could be started again where it was; not so after a full disk."""
        return self._log is None or self._log.is_on

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Meanwhile events are collected; at the end the books are checked, and all is on record.

        No answer may leave before.
        """
        self._in_batch = True
        try:
            with nullcontext() if self._log is None else self._log.batch():
                yield
                super().check()
        finally:
            self._in_batch = False

    def check(self) -> None:
        if not self._in_batch:
            super().check()

    def compact(self) -> None:
        """Begin a new base; call it when a checkpoint is written. A log that was switched off is tried again."""
        if self._log is not None:
            self._log.rotate(freeze(self))

    def detach(self, *, remove: bool) -> None:
        """Write down nothing more; ``remove``: the run has ended, nothing is to be recovered."""
        if self._log is not None:
            self._log.close(remove=remove)
        self._log = None

    # ------------------------------------------------------------------ events

    def issue(self, actor: str, version: int, now: float) -> Ticket | None:
        ticket = super().issue(actor, version, now)
        if ticket is not None:
            self._record("issue", ticket, actor=actor, version=version, now=now)
        return ticket

    def submit(self, actor: str, group: Group, now: float) -> Answer:
        answer = super().submit(actor, group, now)
        if answer.fresh and answer.outcome != "late":  # what is late was counted by waste
            self._record("submit", answer, group=group, actor=actor, now=now)
        return answer

    def waste(self, ordinal: int, attempt: int, sequences: int, tokens: int) -> None:
        super().waste(ordinal, attempt, sequences, tokens)
        self._record("waste", None, ordinal=ordinal, attempt=attempt, sequences=sequences, tokens=tokens)

    def fail(self, actor: str, ordinal: int, attempt: int, reason: str, *, final: bool) -> Answer:
        answer = super().fail(actor, ordinal, attempt, reason, final=final)
        if answer.fresh:
            self._record("fail", answer, actor=actor, ordinal=ordinal, attempt=attempt, reason=reason, final=final)
        return answer

    def lose(self, actor: str, reason: str = "actor_lost", kept: Sequence[Sequence[int]] = ()) -> list[Lost]:
        lost = super().lose(actor, reason, kept)
        if lost:
            self._record("lose", lost, actor=actor, reason=reason, kept=[list(key) for key in kept])
        return lost

    def lease(self, stage: str, scorer: str, now: float) -> Group | None:
        group = super().lease(stage, scorer, now)
        if group is not None:
            self._record("lease", group, stage=stage, scorer=scorer, now=now)
        return group

    def annotate(self, scorer: str, annotation: Annotation, now: float) -> Answer:
        answer = super().annotate(scorer, annotation, now)
        if answer.fresh:
            self._record("annotate", answer, annotation=annotation, scorer=scorer, now=now)
        return answer

    def fail_stage(
        self, scorer: str, stage: str, ordinal: int, attempt: int, reason: str, now: float, *, final: bool
    ) -> Answer:
        answer = super().fail_stage(scorer, stage, ordinal, attempt, reason, now, final=final)
        if answer.fresh:
            work: dict[str, Any] = {"ordinal": ordinal, "attempt": attempt, "stage": stage}
            self._record("fail_stage", answer, **work, scorer=scorer, reason=reason, now=now, final=final)
        return answer

    def lose_scorer(self, scorer: str, *, died: bool) -> tuple[int, list[tuple[int, int]]]:
        num_leased, deadly = super().lose_scorer(scorer, died=died)
        if num_leased:
            self._record("lose_scorer", (num_leased, deadly), scorer=scorer, died=died)
        return num_leased, deadly

    def expire(self, now: float) -> list[Lost]:
        returned = self.scoring.returned
        lost = super().expire(now)
        if lost or self.scoring.returned != returned:
            self._record("expire", lost, now=now)
        return lost

    def recall(self, now: float) -> list[Lost]:
        lost = super().recall(now)
        self._record("recall", lost, now=now)
        return lost

    def deliver(self) -> Delivery | None:
        delivery = super().deliver()
        if delivery is not None:
            self._record("deliver", delivery)
        return delivery

    def train(self, step: int) -> None:
        super().train(step)
        self._record("train", None, step=step)

    def rewind(self, step: int, undone: Sequence[Undone]) -> list[Lost]:
        lost = super().rewind(step, undone)
        rows = [[u.ordinal, u.attempt, u.task_index, u.uses_before] for u in undone]
        self._record("rewind", lost, step=step, undone=rows)
        return lost

    def close(self, reason: str) -> list[Lost]:
        lost = super().close(reason)
        self._record("close", lost, reason=reason)
        return lost

    def note(self, name: str, value: Any) -> None:
        super().note(name, value)
        self._record("note", None, name=name, value=value)

    def rejoin(self, now: float) -> None:
        super().rejoin(now)
        self._record("rejoin", None, now=now)

    # ------------------------------------------------------------------ the record

    def _record(
        self, event: str, result: object, group: Group | None = None, annotation: Annotation | None = None, **args: Any
    ) -> None:
        """Append an event with what it said; the ledger is as it is after it."""
        if self._log is None or not self._log.is_on:
            return
        fields = {"args": args, "said": _summary(result)}
        if group is not None:
            frames = encode_groups(event, [group], **fields)
        elif annotation is not None:
            frames = encode_annotations(event, [annotation], **fields)
        else:
            frames = [pack_header({"type": event, **fields})]
        self._log.append(frames)
        if self._log.is_large(self.held_bytes):
            self.compact()


_LIMITS = replace(LIMITS, header_bytes=4 * LIMITS.header_bytes)
"""A header that a client may send, and what an event adds to it."""
_PLAIN = frozenset(
    {
        *("issue", "waste", "fail", "lose", "expire", "recall", "lease", "fail_stage", "lose_scorer"),
        *("deliver", "train", "close", "note", "rejoin"),
    }
)
"""Events whose arguments are plain types."""


def start(ledger: JournaledLedger, folder: Path) -> None:
    """Begin a log in ``folder`` for a ledger that is fresh, or was restored from a checkpoint.

    Raises:
        ConfigError: the log of an earlier server cannot be removed.
    """
    log = EventLog.open(folder)
    log.rotate(freeze(ledger))
    log.flush()
    ledger.attach(log)


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
    if _summary(result) != header["said"]:
        raise ValueError(f"{event} said {header['said']}, and now {_summary(result)}")


def _summary(result: object) -> Any:
    """What an event said, in a few plain words: enough to notice that a repetition went another way."""
    if isinstance(result, (Ticket, Group)):  # a union would be made anew each time
        return [result.ordinal, result.attempt, result.task_index]
    if isinstance(result, Delivery):
        return [g.ordinal for g in result.groups]
    if isinstance(result, Answer):
        return result.outcome
    if isinstance(result, tuple):
        return [result[0], len(result[1])]
    return len(result) if isinstance(result, list) else None
