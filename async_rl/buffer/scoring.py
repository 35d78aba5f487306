"""The groups that wait for their stages, and the scorers that work on them. Pure; the ledger applies what it decides.

submit ─► put ─┬─ queue "reward" ────► lease ─► annotate ─┬─► all stages are in ─► ready
               └─ queue "reference" ─► lease ─► annotate ─┘        useless, failed or deadly MAX_TRIES times ─► filtered

Stages work on a group at the same time. What a lost, silent or late scorer has goes back, and nothing is generated
again. A group with which MAX_TRIES scorers died, all but the first while they had nothing else, is filtered. An
annotation may come from anyone who has or once had the group; the first one counts, later ones are ``late``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from async_rl.buffer.annotating import awaited, fault, merged
from async_rl.buffer.answers import Answers
from async_rl.buffer.judge import judge_rewards
from async_rl.buffer.records import Answer, Entry, Rules
from async_rl.buffer.shelf import Shelf
from async_rl.buffer.stage_queue import StageQueue, Work
from async_rl.data import Annotation, Group

MAX_TRIES = 3
"""After so many failed tries of a stage at a group, or deaths of scorers that had it, it is filtered."""

Decision = tuple[Answer, Entry | None]
"""What to answer, and the entry that it changed."""


class Scoring:
    """Entries by ordinal while they await something."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._entries = Shelf()
        self._answers = Answers()
        self.queues = {stage: StageQueue() for stage in rules.stages}
        """By stage."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._entries

    def get(self, ordinal: int) -> Entry | None:
        """The entry of this ordinal, if it awaits something."""
        return self._entries.get(ordinal)

    def values(self) -> Iterator[Entry]:
        """The entries, in order of arrival."""
        return iter(self._entries.values())

    @property
    def due(self) -> Counter[int]:
        """How many are to be trained by which deadline."""
        return self._entries.due

    def put(self, entry: Entry) -> None:
        """A group that awaits at least one stage."""
        self._entries[entry.ordinal] = entry
        for stage in awaited(entry.payload, self._rules.stages):
            self.queues[stage].add(entry)

    def remove(self, ordinal: int) -> None:
        """It has moved on; nothing happens if it was not here."""
        if self._entries.pop(ordinal, None) is not None:
            for queue in self.queues.values():
                queue.remove(ordinal)

    def is_complete(self, entry: Entry) -> bool:
        """Whether every stage has annotated it."""
        return not any(entry.ordinal in queue for queue in self.queues.values())

    # ------------------------------------------------------------------ scorers

    def lease(self, stage: str, scorer: str, now: float) -> Group | None:
        """The most urgent group that waits for ``stage``; ``None`` if none does."""
        entry = self.queues[stage].lease(scorer, now)
        if entry is None:
            return None
        self._answers.forget((*entry.key, stage, scorer))
        return entry.payload

    def annotate(self, scorer: str, annotation: Annotation, now: float) -> Decision:
        """A stage's result; its group is exchanged for one that has it. A repeated message gets the same answer."""
        stage, key = annotation.stage, (annotation.ordinal, annotation.attempt)
        answer = self._answers.take((*key, stage, scorer))
        work = self.queues[stage].find(*key)
        if answer is not None or work is None:
            return answer or Answer("late", "moved_on"), None
        if scorer not in work.holders:
            return Answer("refused", "never_leased"), None
        reason = fault(annotation, work.entry.payload)
        if reason:
            return self._failed(scorer, stage, work, Answer("refused", reason))
        entry = work.entry
        entry.group = merged(entry.payload, annotation)
        self.queues[stage].finish(entry.ordinal, now)
        answer = judge_rewards(entry.payload.rewards, self._rules) if stage == "reward" else Answer("accepted")
        return self._decided(scorer, stage, entry, answer)

    def fail(self, scorer: str, stage: str, ordinal: int, attempt: int, reason: str, *, final: bool) -> Decision:
        """A scorer gives up: ``final`` filters the task, otherwise another try is made, :data:`MAX_TRIES` at most."""
        answer = self._answers.take((ordinal, attempt, stage, scorer))
        work = self.queues[stage].find(ordinal, attempt)
        if answer is not None or work is None or work.scorer != scorer:
            return answer or Answer("late", "moved_on"), None
        if not final:
            return self._failed(scorer, stage, work, Answer("failed", reason))
        self.queues[stage].failed += 1
        return self._decided(scorer, stage, work.entry, Answer("filtered", reason))

    def lose(self, scorer: str, *, died: bool) -> tuple[int, list[Entry]]:
        """A scorer is gone: how many groups go back, and those among them that scorers do not survive."""
        lost = [work for queue in self.queues.values() for work in queue.lose(scorer, died=died)]
        return len(lost), [work.entry for work in lost if work.deaths >= MAX_TRIES]

    def expire(self, now: float, limit_s: float) -> None:
        """Leases older than ``limit_s`` go back."""
        for queue in self.queues.values():
            queue.expire(now, limit_s)

    def free(self) -> None:
        """All leases go back."""
        for queue in self.queues.values():
            queue.free()

    # ------------------------------------------------------------------ accounts

    @property
    def returned(self) -> int:
        """Leases that ran out or were lost, of all stages."""
        return sum(queue.returned for queue in self.queues.values())

    def describe(self, entry: Entry) -> str:
        """Which stages it awaits, and who has it."""
        works = {stage: queue.find(*entry.key) for stage, queue in self.queues.items()}
        return ", ".join(f"{stage}: {work.scorer or 'no scorer'}" for stage, work in works.items() if work is not None)

    def to_plain(self) -> dict[str, dict[str, Any]]:
        """Counts by stage."""
        return {stage: queue.to_plain() for stage, queue in self.queues.items()}

    def freeze(self) -> dict[str, Any]:
        """Leases, tries and counts by stage, in plain types; the entries are frozen with the ledger's."""
        return {stage: queue.freeze() for stage, queue in self.queues.items()}

    def restore(self, plain: dict[str, Any]) -> None:
        """Take up what :meth:`freeze` gave; the entries were put before."""
        for stage, queue in self.queues.items():
            queue.restore(plain[stage])

    # ------------------------------------------------------------------ transitions

    def _failed(self, scorer: str, stage: str, work: Work, answer: Answer) -> Decision:
        queue, entry = self.queues[stage], work.entry
        work.tries += 1
        queue.failed += 1
        if work.tries >= MAX_TRIES:
            return self._decided(scorer, stage, entry, Answer("filtered", answer.reason))
        if work.scorer == scorer:
            queue.give_back(entry.ordinal)
        return self._decided(scorer, stage, entry, answer)

    def _decided(self, scorer: str, stage: str, entry: Entry, answer: Answer) -> Decision:
        self._answers.put((*entry.key, stage, scorer), answer.with_fresh(False))
        return answer.with_fresh(True), entry
