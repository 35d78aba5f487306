"""The ledger: a pure state machine that says which ticket is issued, which group is trained, and when.

                 submit                 deliver(s)            train(s)
    issue ─► open ─► (scoring) ─► ready ────────► delivered ────────► trained
              │          │          ▲ │ too old       └─ uses left ─► ready
              │          └ annotate ┘ ▼
              ├─ fail, lease, lost actor, straggler ─► failed(reason)    the ordinal is issued again, first
              └─ judged useless ────────────────────► filtered(reason)  a fresh ordinal takes its place

Each stage must annotate what is in ``scoring``, see :mod:`async_rl.buffer.scoring`. A learner that lost its newest
steps takes the ledger back to the step that it has: :meth:`Ledger.rewind`.

No I/O and no clock: every event brings ``now``. Whatever changes the ledger is a public method, so that a journal can
repeat it, see :mod:`async_rl.buffer.journaled`. The books close after each event:
``issued = open + scoring + ready + delivered + trained + filtered + failed``, in attempts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from async_rl.buffer.annotating import blank
from async_rl.buffer.books import Books
from async_rl.buffer.control_rules import episodes_of
from async_rl.buffer.curriculum import Curriculum
from async_rl.buffer.judge import judge
from async_rl.buffer.policy import capacity, choose
from async_rl.buffer.records import Answer, Delivery, Entry, Lost, Overdue, Rules
from async_rl.buffer.scoring import Decision
from async_rl.buffer.undo import TrainedSteps, Undone
from async_rl.buffer.watchdog import Watchdog
from async_rl.data import Annotation, Group, age
from async_rl.protocol import Ticket


class Ledger(Books):
    """The events of one run, and what follows from them.

    Args:
        rules: sizes, bounds and time limits.
        task_index: the task of an ordinal, see :func:`async_rl.buffer.stream.task_index`.
        curriculum: picks the tasks of fresh ordinals in place of ``task_index``, and hears how they went.
    """

    def __init__(self, rules: Rules, task_index: Callable[[int], int], curriculum: Curriculum | None = None) -> None:
        super().__init__(rules)
        self.curriculum = curriculum
        self._task_index = task_index
        self.version = 0
        """Steps trained, which is the newest version."""
        self.next_step = 0
        """Next step to deliver."""
        self.epoch = 0
        """Rewinds to an earlier step."""
        self.notes: dict[str, Any] = {}
        """What the service keeps beside the ledger, see :meth:`note`."""
        self.trained_steps = TrainedSteps()
        self.heard: set[int] = set()
        """Ordinals that are sampled again after a rewind, of which the curriculum has heard."""
        self._watchdog = Watchdog(rules.watchdog_s)

    # ------------------------------------------------------------------ tickets

    def has_room(self, version: int) -> bool:
        """Admission for an actor that samples with ``version``.

        ``open + scoring + ready < capacity``, see :func:`async_rl.buffer.policy.capacity`. Bytes hold tickets back only
        beyond one step's worth, or a small ``max_bytes`` would stop the run.
        """
        full = self.held_bytes >= self.rules.max_bytes and self.outstanding >= self.rules.groups_per_step
        return self.outstanding < capacity(self.rules, version, self.next_step) and not full

    def issue(self, actor: str, version: int, now: float) -> Ticket | None:
        """One ticket for an actor whose live version is ``version``, retries first; ``None`` if there is no room."""
        if version > self.version:
            raise RuntimeError(f"{actor} is at version {version}, the newest is {self.version}")
        if not self.has_room(version):
            return None
        if self.retry:
            ordinal, attempt, task_index, draw = heapq.heappop(self.retry)
        else:
            ordinal, attempt, task_index, draw = self.next_ordinal, 0, self._fresh_task(), 0
            self.next_ordinal += 1
        entry = Entry(
            ordinal=ordinal,
            attempt=attempt,
            task_index=task_index,
            actor=actor,
            version=version,
            deadline=version + self.rules.max_staleness,
            issued_at=now,
            draw=draw,
        )
        self.reopen(entry)
        self.issued += 1
        self.check()
        return Ticket(ordinal, attempt, task_index, self.rules.group_size, version, self.rules.lease_s, draw)

    def _fresh_task(self) -> int:
        return self._task_index(self.next_ordinal) if self.curriculum is None else self.curriculum.pick()

    # ------------------------------------------------------------------ what actors say

    def submit(self, actor: str, group: Group, now: float) -> Answer:
        """A finished group. Idempotent in (ordinal, attempt); a repeated submit gets the same answer."""
        found = self._open_entry(actor, group.ordinal, group.attempt)
        if isinstance(found, Answer):
            if found.fresh:
                self.waste(group.ordinal, group.attempt, len(group), group.num_sampled)
            return found
        entry, answer = found, judge(group, found, self.rules, self.version)
        self._answers.put(entry.key, answer.with_fresh(False))
        if answer.outcome != "refused":
            group = blank(group, self.rules.stages)
            self._observe(group)
        if answer.outcome == "accepted":
            self._accept(entry, group, now)
        elif answer.outcome == "filtered":
            self.tally.add(group, "filtered", "generated")
            self._filter(entry, answer.reason)
        else:
            self.tally.add(group, "lost", "generated")
            self._fail(entry, answer.reason, by_content=True)
        self.check()
        return answer

    def waste(self, ordinal: int, attempt: int, sequences: int, tokens: int) -> None:
        """A group came after its ticket was taken back: it is counted, and a repeated one counts nothing."""
        self._answers.take((ordinal, attempt))
        self.tally.count("lost", sequences, tokens)
        self.tally.count("generated", sequences, tokens)

    def fail(self, actor: str, ordinal: int, attempt: int, reason: str, *, final: bool) -> Answer:
        """An attempt that its holder gave up: ``final`` filters the task, otherwise the ordinal is issued again."""
        found = self._open_entry(actor, ordinal, attempt)
        if isinstance(found, Answer):
            return found
        if final:
            self._filter(found, reason)
        else:
            self._fail(found, reason, by_content=True)
        answer = Answer("filtered" if final else "failed", reason)
        self._answers.put(found.key, answer)
        self.check()
        return answer.with_fresh(True)

    def lose(self, actor: str, reason: str = "actor_lost", kept: Sequence[Sequence[int]] = ()) -> list[Lost]:
        """A dead or leaving actor: all its open attempts go back at once, but (ordinal, attempt) it still has."""
        has = {(ordinal, attempt) for ordinal, attempt in kept}
        lost = self._take_back([e for e in self.open.values() if e.actor == actor and e.key not in has], reason)
        if not self.leases[actor]:
            del self.leases[actor]
        return lost

    # ------------------------------------------------------------------ what scorers say

    def lease(self, stage: str, scorer: str, now: float) -> Group | None:
        """The most urgent group that waits for ``stage``; ``None``: none does, or ``scorer`` must first end others."""
        return self.scoring.lease(stage, scorer, now)

    def annotate(self, scorer: str, annotation: Annotation, now: float) -> Answer:
        """A stage's result for a group; it is ready once every stage's is in. Idempotent, as :meth:`submit`."""
        answer, entry = self.scoring.annotate(scorer, annotation, now)
        if entry is not None and annotation.stage == "reward":
            self._observe(entry.payload)
        return self._scored((answer, entry), now)

    def fail_stage(
        self, scorer: str, stage: str, ordinal: int, attempt: int, reason: str, now: float, *, final: bool
    ) -> Answer:
        """A scorer gives up a group: ``final`` filters the task, otherwise another try is made, a few at most."""
        return self._scored(self.scoring.fail(scorer, stage, ordinal, attempt, reason, final=final), now)

    def lose_scorer(self, scorer: str, *, died: bool) -> tuple[int, list[tuple[int, int]]]:
        """A scorer is gone: what it has goes to others, but what scorers die of is filtered, as ``scorers_died``.

        Args:
            scorer: its name.
            died: or left in such a way that what it has may be the cause; not if only its connection broke.

        Returns:
            How many groups it had; ordinal and attempt of those that are filtered.
        """
        num_leased, deadly = self.scoring.lose(scorer, died=died)
        for entry in deadly:
            self.tally.add(entry.payload, "filtered")
            self._filter(entry, "scorers_died")
        self.check()
        return num_leased, [entry.key for entry in deadly]

    # ------------------------------------------------------------------ time

    def expire(self, now: float) -> list[Lost]:
        """Take back what was not returned, or not annotated, within its lease."""
        self.scoring.expire(now, self.rules.lease_s)
        expired = []
        for entry in self.open.values():
            if now - entry.issued_at <= self.rules.lease_s:
                break
            expired.append(entry)
            self._watchdog.expired(entry, now)
        return self._take_back(expired, "lease_expired")

    def watch(self, now: float, *, step_waits: bool) -> Overdue | None:
        """The watchdog; call it regularly. Old tickets are issued again, old leases of scorers go to others.

        Args:
            now: the clock.
            step_waits: the learner waits for a step, so somebody should hold tickets.
        """
        if not self._watchdog.barks(now, work_waits=bool(self.open) or len(self.scoring) > 0 or step_waits):
            return None
        states = [(e, "open") for e in self.open.values()]
        states += [(e, f"scoring ({self.scoring.describe(e)})") for e in self.scoring.values()]
        table, rounds = self._watchdog.table(states, now), self._watchdog.rounds
        lost = self.recall(now)
        return Overdue(rounds, rounds >= self.rules.watchdog_rounds, table, tuple(lost))

    def recall(self, now: float) -> list[Lost]:
        """What is open, or leased to a scorer, for longer than ``watchdog_s`` goes to others."""
        limit_s = self.rules.watchdog_s
        self.scoring.expire(now, limit_s)
        return self._take_back([e for e in self.open.values() if now - e.issued_at > limit_s], "watchdog")

    # ------------------------------------------------------------------ what the learner says

    def deliver(self) -> Delivery | None:
        """The batch of ``next_step``, or ``None`` if it has to wait. Afterwards that step is taken.

        With ``stragglers = wait`` it waits for open work that would get too old otherwise. The bound is proven here,
        at consumption, from the tokens' own versions.
        """
        step, rules = self.next_step, self.rules
        if len(self.ready) < rules.groups_per_step:  # asked after each message: nothing is counted for it
            return None
        chosen = choose(rules, step, self.ready, self.open.due + self.scoring.due)
        if chosen is None:
            return None
        for entry in chosen:
            if age(entry.payload, step) > rules.max_staleness:
                raise RuntimeError(f"ordinal {entry.ordinal} would be trained at age {age(entry.payload, step)}")
            del self.ready[entry.ordinal]
        chosen.sort(key=lambda e: e.ordinal)
        self.delivered[step] = chosen
        self.next_step += 1
        lost = self._cut()
        return Delivery(step, tuple(e.payload for e in chosen), tuple(lost))

    def train(self, step: int) -> None:
        """Step ``step`` is trained and makes version ``step + 1``; groups with uses left go back while young enough.

        Raises:
            RuntimeError: steps are trained once, in order, after their delivery.
        """
        if step != self.version or step not in self.delivered:
            raise RuntimeError(f"trained step {step}, but the next is {self.version}, delivered {list(self.delivered)}")
        self.version = step + 1
        entries = self.delivered.pop(step)
        self.trained_steps.add(step, entries, self.tally)
        for entry in entries:
            entry.uses += 1
            again = entry.uses < self.rules.max_uses and self.next_step <= min(entry.deadline, self.rules.steps - 1)
            if again:
                self.ready[entry.ordinal] = entry
            else:
                self._retire(entry)
        self.check()

    def rewind(self, step: int, undone: Sequence[Undone]) -> list[Lost]:
        """The learner continues at ``step``; what it has trained and published since is void.

        What is delivered is ready again. If ``step`` is the newest version, that is all. Otherwise attempts that were
        trained since are sampled again, unless a use of theirs remains; groups with a token of a void version and all
        that is open fail and are issued again. Each ordinal keeps its draw.

        Args:
            step: steps trained in the learner's state.
            undone: attempts that were trained in void steps, see :func:`async_rl.buffer.undo.undone`.

        Returns:
            The open attempts with their holders.

        Raises:
            RuntimeError: the learner is ahead, or something is undone that was not trained.
        """
        if not 0 <= step <= self.version:
            raise RuntimeError(f"a rewind to step {step}, but the newest version is {self.version}")
        for entry in [e for entries in self.delivered.values() for e in entries]:
            self.ready[entry.ordinal] = entry
        self.delivered.clear()
        self.next_step = self.version
        if step == self.version:
            return []
        self.epoch += 1
        self.version = self.next_step = step
        draws = self.trained_steps.take_back(step, self.tally)
        again = {ordinal for ordinal, *_ in self.retry}
        for item in undone:
            self._untrain(item, draws.get(item.ordinal, 0), is_queued=item.ordinal in again)
        lost = self._take_back(list(self.open.values()), "learner_restarted")
        held = (*self.scoring.values(), *self.ready.values())
        for entry in [e for e in held if int(e.payload.arrays["versions"].max()) > step]:
            self._will_be_heard_again(entry.ordinal, entry.payload)
            self._fail(entry, "void_version")
        self.check()
        return lost

    def close(self, reason: str) -> list[Lost]:
        """End of the run: whatever is left becomes terminal, the open attempts with their holders are returned."""
        left = [*self.open.values(), *self.scoring.values(), *self.ready.values()]
        left += [e for entries in self.delivered.values() for e in entries]
        self.delivered.clear()
        for entry in [e for e in left if e.uses]:
            self.ready.pop(entry.ordinal, None)
            self._retire(entry)
        lost = self._take_back([e for e in left if not e.uses], reason)
        self.abandoned += len(self.retry)
        self.retry.clear()
        self.check()
        return lost

    # ------------------------------------------------------------------ what the service says

    def note(self, name: str, value: Any) -> None:
        """Keep a small fact, in plain types with text keys, beside the ledger; the last one of a name counts."""
        self.notes[name] = value

    @property
    def has_forgotten(self) -> bool:
        """Whether clients may hold tickets of which nothing is known: the journal was lost, and they go on."""
        return bool(self.notes.get("forgotten"))

    def resume(self) -> None:
        """Last act of a restore from a checkpoint: apply the bound and check the books."""
        heapq.heapify(self.retry)
        self._cut()

    def rejoin(self, now: float) -> None:
        """Last act of a recovery: no scorer has anything any more, though what it still sends is welcome.

        Tickets stay with their holders. Their ages go on; a clock that starts anew (another boot) makes them young.
        """
        self.scoring.free()
        for entry in self.open.values():
            entry.issued_at = min(entry.issued_at, now)

    # ------------------------------------------------------------------ transitions

    def _open_entry(self, actor: str, ordinal: int, attempt: int) -> Entry | Answer:
        """The open attempt that ``actor`` holds, or the answer to somebody who does not hold it."""
        answer = self._answers.take((ordinal, attempt))
        if answer is not None:
            return answer
        entry = self.open.get(ordinal)
        if entry is not None and entry.attempt == attempt and entry.actor == actor:
            return entry
        if entry is not None and entry.attempt == attempt and not self.has_forgotten:
            return Answer("refused", "held_by_another")
        forgotten = ordinal < self.next_ordinal and (entry is None or attempt < entry.attempt)
        return Answer("late", "forgotten") if forgotten or self.has_forgotten else Answer("refused", "never_issued")

    def _accept(self, entry: Entry, group: Group, now: float) -> None:
        self._close_open(entry)
        self._hold(entry, group)
        self.tally.add(group, "generated")
        if self.rules.control is not None:
            self.tally.episodes.add(*episodes_of(group, self.rules.control))
        if self.rules.stages:
            self.scoring.put(entry)
        else:
            self._make_ready(entry, now)

    def _make_ready(self, entry: Entry, now: float) -> None:
        self.ready[entry.ordinal] = entry
        self._watchdog.fed(now)

    def _scored(self, decision: Decision, now: float) -> Answer:
        """Apply what was decided about a group in scoring."""
        answer, entry = decision
        if entry is None:
            return answer
        if entry.payload.nbytes != entry.nbytes:  # it was annotated
            self.held_bytes += entry.payload.nbytes - entry.nbytes
            entry.nbytes = entry.payload.nbytes
        if answer.outcome == "filtered":
            self.tally.add(entry.payload, "filtered")
            self._filter(entry, answer.reason)
        elif self.scoring.is_complete(entry):
            self.scoring.remove(entry.ordinal)
            self._make_ready(entry, now)
        self.check()
        return answer

    def _observe(self, group: Group) -> None:
        """Rewards are known: the curriculum hears of them."""
        if self.curriculum is None or not np.isfinite(group.rewards).all():
            return
        if group.ordinal in self.heard:
            self.heard.remove(group.ordinal)
        else:
            self.curriculum.observe(group.task_index, group.rewards)

    def _will_be_heard_again(self, ordinal: int, group: Group | None) -> None:
        """The ordinal is sampled again after a rewind: its task must not count twice. ``None``: it was trained."""
        if self.curriculum is not None and (group is None or np.isfinite(group.rewards).all()):
            self.heard.add(ordinal)

    def _untrain(self, item: Undone, draw: int, *, is_queued: bool) -> None:
        """Void the uses of an attempt from a step on; one that has no use left and is gone is sampled again."""
        entry = self.ready.get(item.ordinal)
        if entry is not None and entry.attempt == item.attempt and entry.uses > item.uses_before:
            del self.ready[entry.ordinal]
            entry.uses = item.uses_before
            self.ready[entry.ordinal] = entry
        elif not item.uses_before:
            is_live = is_queued or any(item.ordinal in place for place in (self.open, self.scoring, self.ready))
            if is_live or item.ordinal >= self.next_ordinal or not self.trained:
                raise RuntimeError(f"ordinal {item.ordinal} attempt {item.attempt} was never trained: {self.books()}")
            self.trained -= 1
            self._will_be_heard_again(item.ordinal, None)
            self._try_again(item.ordinal, item.attempt, item.task_index, draw, "learner_restarted")

    def _cut(self) -> list[Lost]:
        """Remove what ``next_step`` may not train any more: the bound, applied as soon as it bites."""
        for entry in [e for e in self.ready.values() if e.deadline < self.next_step]:
            if entry.uses:
                del self.ready[entry.ordinal]
                self._retire(entry)
            else:
                self._fail(entry, "too_old")
        waiting = (*self.open.values(), *self.scoring.values())
        return self._take_back([e for e in waiting if e.deadline < self.next_step], "straggler")
