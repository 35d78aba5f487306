"""The ledger: a pure state machine that says which ticket is issued, which group is trained, and when.

                 submit                 deliver(s)            train(s)
    issue ─► open ─► (scoring) ─► ready ────────► delivered ────────► trained
              │          │          ▲ │ too old       └─ uses left ─► ready
              │          └ annotate ┘ ▼
              ├─ fail, lease, lost actor, straggler ─► failed(reason)    the ordinal is issued again, first
              └─ judged useless ────────────────────► filtered(reason)  a fresh ordinal takes its place

No I/O and no clock: every event brings ``now``. The books close after each event:
``issued = open + scoring + ready + delivered + trained + filtered + failed``, in attempts.

Why nothing gets too old with ``stragglers = wait``. Let N(d) be the number of never-trained attempts that must be
trained at step d or before. Admission keeps N(d) ≤ (d + 1 - next_step) · groups_per_step for every d, so a schedule
exists; delivery takes the earliest deadlines first, and only when the rest still fits into the steps that are left.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from async_rl.buffer.answers import Answers
from async_rl.buffer.judge import judge
from async_rl.buffer.policy import by_urgency, capacity, leaves_time
from async_rl.buffer.records import Answer, Delivery, Entry, Lost, Overdue, Rules
from async_rl.buffer.tally import Tally
from async_rl.buffer.watchdog import Watchdog
from async_rl.data import Group, age
from async_rl.protocol import Ticket


class Ledger:
    """Books of one run.

    Args:
        rules: sizes, bounds and time limits.
        task_index: the task of an ordinal, see :func:`async_rl.buffer.stream.task_index`.
    """

    def __init__(self, rules: Rules, task_index: Callable[[int], int]) -> None:
        self.rules = rules
        self._task_index = task_index
        self.version = 0
        """Steps trained, which is the newest version."""
        self.next_step = 0
        """Next step to deliver."""
        self.next_ordinal = 0
        self.issued = 0
        self.trained = 0
        self.filtered: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.open: dict[int, Entry] = {}
        """By ordinal, in order of issue and so of lease expiry."""
        self.scoring: dict[int, Entry] = {}
        self.ready: dict[int, Entry] = {}
        self.delivered: dict[int, list[Entry]] = {}
        """By step."""
        self.leases: Counter[str] = Counter()
        """Open attempts by actor."""
        self.held_bytes = 0
        self.retry: list[tuple[int, int]] = []
        """Heap of (ordinal, next attempt) to be issued before fresh ordinals."""
        self.tally = Tally()
        self._answers = Answers()
        self._watchdog = Watchdog(rules.watchdog_s)

    # ------------------------------------------------------------------ tickets

    @property
    def outstanding(self) -> int:
        """Attempts that some later step has to train: open + scoring + ready."""
        return len(self.open) + len(self.scoring) + len(self.ready)

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
            ordinal, attempt = heapq.heappop(self.retry)
        else:
            ordinal, attempt = self.next_ordinal, 0
            self.next_ordinal += 1
        entry = Entry(
            ordinal=ordinal,
            attempt=attempt,
            task_index=self._task_index(ordinal),
            actor=actor,
            version=version,
            deadline=version + self.rules.max_staleness,
            issued_at=now,
        )
        self.open[ordinal] = entry
        self.leases[actor] += 1
        self.issued += 1
        self._check()
        return Ticket(ordinal, attempt, entry.task_index, self.rules.group_size, version, self.rules.lease_s)

    # ------------------------------------------------------------------ what actors say

    def submit(self, actor: str, group: Group, now: float) -> Answer:
        """A finished group. Idempotent in (ordinal, attempt); a repeated submit gets the same answer."""
        found = self._open_entry(actor, group.ordinal, group.attempt)
        if isinstance(found, Answer):
            if found.fresh:
                self.tally.add(group, "lost", "generated")
            return found
        entry, answer = found, judge(group, found, self.rules, self.version)
        self._answers.put(entry.key, replace(answer, fresh=False))
        if answer.outcome == "accepted":
            self._accept(entry, group, now)
        elif answer.outcome == "filtered":
            self.tally.add(group, "filtered", "generated")
            self._close_open(entry)
            self.filtered[answer.reason] += 1
        else:
            self.tally.add(group, "lost", "generated")
            self._fail(entry, answer.reason)
        self._check()
        return answer

    def fail(self, actor: str, ordinal: int, attempt: int, reason: str, *, final: bool) -> Answer:
        """An attempt that its holder gave up: ``final`` filters the task, otherwise the ordinal is issued again."""
        found = self._open_entry(actor, ordinal, attempt)
        if isinstance(found, Answer):
            return found
        if final:
            self._close_open(found)
            self.filtered[reason] += 1
        else:
            self._fail(found, reason)
        answer = Answer("filtered" if final else "failed", reason)
        self._answers.put(found.key, answer)
        self._check()
        return replace(answer, fresh=True)

    def annotate(self, ordinal: int, attempt: int, stage: str, group: Group) -> bool:
        """Stage ``stage`` returns the group with its arrays added; ready once every stage has. False if it moved on."""
        entry = self.scoring.get(ordinal)
        if entry is None or entry.attempt != attempt or stage not in entry.awaits:
            return False
        entry.awaits.discard(stage)
        self.held_bytes += group.nbytes - entry.nbytes
        entry.group, entry.nbytes = group, group.nbytes
        if not entry.awaits:
            self.ready[ordinal] = self.scoring.pop(ordinal)
        self._check()
        return True

    def lose(self, actor: str, reason: str = "actor_lost") -> list[Lost]:
        """A dead or leaving actor: all its open attempts go back at once."""
        lost = self._take_back([e for e in self.open.values() if e.actor == actor], reason)
        del self.leases[actor]
        return lost

    # ------------------------------------------------------------------ time

    def expire(self, now: float) -> list[Lost]:
        """Take back what was not returned within its lease."""
        expired = []
        for entry in self.open.values():
            if now - entry.issued_at <= self.rules.lease_s:
                break
            expired.append(entry)
            self._watchdog.expired(entry, now)
        return self._take_back(expired, "lease_expired")

    def watch(self, now: float, *, step_waits: bool) -> Overdue | None:
        """The watchdog; call it regularly.

        Args:
            now: the clock.
            step_waits: the learner waits for a step, so somebody should hold tickets.
        """
        waiting = [*self.open.values(), *self.scoring.values()]
        if not self._watchdog.barks(now, work_waits=bool(waiting) or step_waits):
            return None
        table, rounds = self._watchdog.table(waiting, now), self._watchdog.rounds
        lost = self._take_back([e for e in waiting if now - e.issued_at > self.rules.watchdog_s], "watchdog")
        return Overdue(rounds, rounds >= self.rules.watchdog_rounds, table, tuple(lost))

    # ------------------------------------------------------------------ what the learner says

    def deliver(self) -> Delivery | None:
        """The batch of ``next_step``, or ``None`` if it has to wait. Afterwards that step is taken.

        With ``stragglers = wait`` it waits for open work that would get too old otherwise. The bound is proven here,
        at consumption, from the tokens' own versions.
        """
        step, rules = self.next_step, self.rules
        if step >= rules.steps or len(self.ready) < rules.groups_per_step:
            return None
        order = by_urgency(self.ready.values())
        chosen, rest = order[: rules.groups_per_step], order[rules.groups_per_step :]
        waiting = (*self.open.values(), *self.scoring.values())
        if rules.stragglers == "wait" and not leaves_time(rules, step, waiting, rest):
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
        for entry in self.delivered.pop(step):
            entry.uses += 1
            self.tally.add(entry.payload, "trained")
            again = entry.uses < self.rules.max_uses and self.next_step <= min(entry.deadline, self.rules.steps - 1)
            if again:
                self.ready[entry.ordinal] = entry
            else:
                self._retire(entry)
        self._check()

    def close(self, reason: str) -> list[Lost]:
        """End of the run: whatever is left becomes terminal, the open attempts with their holders are returned."""
        left = [*self.open.values(), *self.scoring.values(), *self.ready.values()]
        left += [e for entries in self.delivered.values() for e in entries]
        self.delivered.clear()
        for entry in [e for e in left if e.uses]:
            self.ready.pop(entry.ordinal, None)
            self._retire(entry)
        lost = self._take_back([e for e in left if not e.uses], reason)
        self.retry.clear()
        return lost

    # ------------------------------------------------------------------ books

    def books(self) -> dict[str, int]:
        """The counts that close."""
        return {
            "issued": self.issued,
            "open": len(self.open),
            "scoring": len(self.scoring),
            "ready": len(self.ready),
            "delivered": sum(map(len, self.delivered.values())),
            "trained": self.trained,
            "filtered": self.filtered.total(),
            "failed": self.failed.total(),
        }

    # ------------------------------------------------------------------ resume (see journal.py)

    def requeue(self, ordinal: int, attempt: int, reason: str) -> None:
        """An attempt that was open in a restored ledger is failed; the ordinal is issued again."""
        self.failed[reason] += 1
        self._answers.put((ordinal, attempt), Answer("late", reason, fresh=True))
        heapq.heappush(self.retry, (ordinal, attempt + 1))

    def readmit(self, group: Group, version: int, uses: int) -> None:
        """A group that a restored ledger held, issued at ``version`` and trained ``uses`` times, is ready."""
        entry = Entry(
            ordinal=group.ordinal,
            attempt=group.attempt,
            task_index=group.task_index,
            actor="",
            version=version,
            deadline=version + self.rules.max_staleness,
            issued_at=0.0,
            uses=uses,
        )
        self._hold(entry, group)
        self._answers.put(entry.key, Answer("accepted"))
        self.ready[entry.ordinal] = entry

    def resume(self) -> None:
        """Last act of a restore: apply the bound and check the books."""
        heapq.heapify(self.retry)
        self._cut()

    # ------------------------------------------------------------------ transitions

    def _open_entry(self, actor: str, ordinal: int, attempt: int) -> Entry | Answer:
        """The open attempt that ``actor`` holds, or the answer to somebody who does not hold it."""
        answer = self._answers.take((ordinal, attempt))
        if answer is not None:
            return answer
        entry = self.open.get(ordinal)
        if entry is not None and entry.attempt == attempt and entry.actor == actor:
            return entry
        if entry is not None and entry.attempt == attempt:
            return Answer("refused", "held_by_another")
        forgotten = ordinal < self.next_ordinal and (entry is None or attempt < entry.attempt)
        return Answer("late", "forgotten") if forgotten else Answer("refused", "never_issued")

    def _accept(self, entry: Entry, group: Group, now: float) -> None:
        self._close_open(entry)
        self._hold(entry, group)
        self.tally.add(group, "generated")
        entry.awaits = set(self.rules.stages)
        (self.scoring if entry.awaits else self.ready)[entry.ordinal] = entry
        self._watchdog.accepted(now)

    def _hold(self, entry: Entry, group: Group) -> None:
        entry.group, entry.nbytes = group, group.nbytes
        entry.deadline = group.oldest_version + self.rules.max_staleness
        self.held_bytes += entry.nbytes

    def _cut(self) -> list[Lost]:
        """Remove what ``next_step`` may not train any more: the bound, applied as soon as it bites."""
        for entry in [e for e in self.ready.values() if age(e.payload, self.next_step) > self.rules.max_staleness]:
            if entry.uses:
                del self.ready[entry.ordinal]
                self._retire(entry)
            else:
                self._fail(entry, "too_old")
        waiting = (*self.open.values(), *self.scoring.values())
        return self._take_back([e for e in waiting if e.deadline < self.next_step], "straggler")

    def _take_back(self, entries: Iterable[Entry], reason: str) -> list[Lost]:
        lost = []
        for entry in entries:
            if entry.ordinal in self.open:
                lost.append(Lost(entry.actor, *entry.key, reason))
                self._answers.put(entry.key, Answer("late", reason, fresh=True))
            self._fail(entry, reason)
        self._check()
        return lost

    def _fail(self, entry: Entry, reason: str) -> None:
        """Terminal for the attempt, from any state; the ordinal is tried again."""
        if entry.ordinal in self.open:
            self._close_open(entry)
        self.scoring.pop(entry.ordinal, None)
        self.ready.pop(entry.ordinal, None)
        if entry.group is not None:
            self.tally.add(entry.group, "lost")
        self._release(entry)
        self.failed[reason] += 1
        heapq.heappush(self.retry, (entry.ordinal, entry.attempt + 1))

    def _close_open(self, entry: Entry) -> None:
        del self.open[entry.ordinal]
        self.leases[entry.actor] -= 1

    def _retire(self, entry: Entry) -> None:
        self.trained += 1
        self._release(entry)

    def _release(self, entry: Entry) -> None:
        self.held_bytes -= entry.nbytes
        entry.group, entry.nbytes = None, 0

    def _check(self) -> None:
        books = self.books()
        if books["issued"] != sum(books.values()) - books["issued"]:
            raise RuntimeError(f"the books do not close: {books}")
