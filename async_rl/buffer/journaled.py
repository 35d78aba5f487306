"""A ledger that a server's death does not harm: what changes it is on record before anyone is answered.

message ─► JournaledLedger.submit ─► Ledger.submit ─► did it change? ─► EventLog.append ─► answer
turn of the server's loop: with batch(): messages, tickets, deliveries ─► one write ─► all answers

A server that was started again gets it back by :mod:`async_rl.buffer.replay`.
The clock is part of the arguments: ``time.monotonic()``, which goes on over a process's death.
"""

# ruff: noqa: D102    (the methods are documented in Ledger)

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from async_rl.buffer.curriculum import Curriculum
from async_rl.buffer.event_log import EventLog
from async_rl.buffer.journal import freeze
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.records import Answer, Delivery, Lost, Rules
from async_rl.buffer.undo import Undone
from async_rl.data import Annotation, Group
from async_rl.protocol import Ticket
from async_rl.wire import encode_annotations, encode_groups, pack_header

_MOST_ISSUES = 1024
"""Tickets of one event."""


class JournaledLedger(Ledger):
    """A ledger with an event log, from :meth:`attach` on. Methods are documented in :class:`Ledger`."""

    def __init__(self, rules: Rules, task_index: Callable[[int], int], curriculum: Curriculum | None = None) -> None:
        super().__init__(rules, task_index, curriculum)
        self._log: EventLog | None = None
        self._in_batch = False
        self._issues: list[tuple[list[Any], Any]] = []
        """Arguments and outcome of tickets issued since the last event on record: thousands a second are one event."""

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
                try:
                    yield
                finally:
                    self._record_issues()
                self._compact_if_large()
                super().check()
        finally:
            self._in_batch = False

    def check(self) -> None:
        if not self._in_batch:
            super().check()

    def compact(self) -> None:
        """Begin a new base; call it when a checkpoint is written. A log that was switched off is tried again."""
        if self._log is not None:
            self._record_issues()  # until the new base is complete, they must be found before it
            self._log.rotate(freeze(self))

    def detach(self, *, remove: bool) -> None:
        """Write down nothing more; ``remove``: the run has ended, nothing is to be recovered."""
        if self._log is not None:
            self._log.close(remove=remove)
        self._log = None

    # ------------------------------------------------------------------ events

    def issue(self, actor: str, version: int, now: float) -> Ticket | None:
        ticket = super().issue(actor, version, now)
        if ticket is not None and self._log is not None and self._log.is_on:
            self._issues.append(([actor, version, now], summary(ticket)))
            if not self._in_batch or len(self._issues) >= _MOST_ISSUES:
                self._record_issues()
                self._compact_if_large()
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
        self._record_issues()
        if self._log is None or not self._log.is_on:
            return
        fields = {"args": args, "said": summary(result)}
        if group is not None:
            frames = encode_groups(event, [group], **fields)
        elif annotation is not None:
            frames = encode_annotations(event, [annotation], **fields)
        else:
            frames = [pack_header({"type": event, **fields})]
        self._log.append(frames)
        self._compact_if_large()

    def _record_issues(self) -> None:
        """Put on record, before the next event, which tickets were issued since the last one.

        The ledger may be beyond them, so that this is no moment for a new base.
        """
        issues, self._issues = self._issues, []
        if issues and self._log is not None:
            rows, said = zip(*issues, strict=True)
            self._log.append([pack_header({"type": "issue", "args": {"rows": rows}, "said": said})])

    def _compact_if_large(self) -> None:
        if self._log is not None and self._log.is_on and self._log.is_large(self.held_bytes):
            self.compact()


def start(ledger: JournaledLedger, folder: Path) -> None:
    """Begin a log in ``folder`` for a ledger that is fresh, or was restored from a checkpoint.

    Raises:
        ConfigError: the log of an earlier server cannot be removed.
    """
    log = EventLog.open(folder)
    log.rotate(freeze(ledger))
    log.flush()
    ledger.attach(log)


def summary(result: object) -> Any:
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
