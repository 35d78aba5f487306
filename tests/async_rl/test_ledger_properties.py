"""Random schedules of everything that can happen to the ledger, in any order; the invariants hold after each event.

actors with lagging versions: issue, submit (any mix of versions), fail, die, repeat
scorers: lease, annotate (well, badly, with NaN), lag, fail, die, repeat
learner: deliver (also ahead of training), train        time: leases, watchdog        crash: freeze and thaw
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
from buffer_helpers import NUM_TASKS, annotation, answer, rules
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from async_rl.buffer.journal import Frozen, freeze, thaw
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.undo import batch_row
from async_rl.data import Annotation, Group, age
from async_rl.protocol import Ticket

ACTORS = ("a", "b", "c")
SCORERS = ("x", "y")
"""Each works for every stage, which none does in a run; the ledger does not care."""
FATES = ("keep", "good", "fail", "bad", "equal", "nan", "give up")
"""What becomes of a leased group."""
RARELY = st.integers(0, 5)
"""Zero makes the disaster happen."""


def task_of(ordinal: int) -> int:
    return ordinal % NUM_TASKS


class Schedule(RuleBasedStateMachine):
    @initialize(
        eta=st.sampled_from([0, 1, 2, 4]),
        stragglers=st.sampled_from(["wait", "reissue"]),
        max_uses=st.sampled_from([1, 1, 2, 3]),
        groups_per_step=st.integers(1, 3),
        zero_variance=st.booleans(),
        stages=st.sampled_from([(), (), ("reward",), ("reference",), ("reward", "reference")]),
    )
    def begin(self, eta, stragglers, max_uses, groups_per_step, zero_variance, stages):
        self.rules = rules(
            steps=8,
            groups_per_step=groups_per_step,
            max_staleness=eta,
            stragglers=stragglers,
            max_uses=max_uses,
            replace_zero_variance=zero_variance,
            lease_s=10.0,
            watchdog_s=25.0,
            stages=stages,
        )
        self.ledger = self.fresh_ledger()
        self.now = 0.0
        self.live = dict.fromkeys(ACTORS, 0)
        self.held: dict[tuple[int, int], tuple[str, Ticket]] = {}
        """Every ticket that an actor still works on, cancelled or not."""
        self.sent: list[tuple[str, Group]] = []
        self.leased: list[tuple[str, str, Group]] = []
        """Every group that a scorer still works on for a stage, its lease over or not."""
        self.annotated: list[tuple[str, Annotation]] = []
        self.batches: dict[int, tuple[Group, ...]] = {}
        self.rows: list[dict[str, Any]] = []
        """``batches.jsonl``: the steps of the history that survived."""
        self.checkpoint = self.plain()

    def fresh_ledger(self) -> Ledger:
        return Ledger(self.rules, task_of)

    @property
    def uses(self) -> Counter[int]:
        """Times that an ordinal was trained."""
        return Counter(ordinal for row in self.rows for ordinal in row["ordinals"])

    def plain(self) -> Frozen:
        """The ledger as it comes back from a file."""
        frozen = freeze(self.ledger)
        return Frozen(json.loads(json.dumps(frozen.fields)), frozen.groups)

    # -------------------------------------------------------------- actors

    @rule(actor=st.sampled_from(ACTORS), count=st.integers(1, 6))
    def issue(self, actor, count):
        for _ in range(count):
            outstanding = self.ledger.outstanding
            room = min(self.live[actor] + self.rules.max_staleness + 1, self.rules.steps) - self.ledger.next_step
            ticket = self.ledger.issue(actor, self.live[actor], self.now)
            assert (ticket is not None) == (outstanding < room * self.rules.groups_per_step)
            if ticket is None:
                return
            assert (ticket.ordinal, ticket.attempt) not in self.held
            self.held[ticket.ordinal, ticket.attempt] = (actor, ticket)

    @rule(actor=st.sampled_from(ACTORS))
    def commit(self, actor):
        self.live[actor] = self.ledger.version

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def submit(self, data):
        actor, ticket = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        newest = max(ticket.version, self.ledger.version if data.draw(st.booleans()) else ticket.version)
        oldest = data.draw(st.integers(ticket.version, newest))
        rewards = data.draw(st.sampled_from([(0.0, 1.0), (0.0, 1.0), (1.0, 1.0), (float("nan"), 0.0)]))
        self.send(actor, answer(ticket, versions=(oldest, newest), rewards=rewards))

    def send(self, actor: str, group: Group) -> None:
        self.ledger.submit(actor, group, self.now)
        self.sent.append((actor, group))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def submit_again(self, data):
        actor, group = data.draw(st.sampled_from(self.sent[-10:]))
        before = self.ledger.books()
        assert not self.ledger.submit(actor, group, self.now).fresh
        assert self.ledger.books() == before

    @precondition(lambda self: self.held)
    @rule(data=st.data(), final=st.booleans())
    def fail(self, data, final):
        key = data.draw(st.sampled_from(sorted(self.held)))
        actor, _ = self.held.pop(key)
        self.ledger.fail(actor, *key, "broken", final=final)

    @rule(actor=st.sampled_from(ACTORS), chance=RARELY)
    def die(self, actor, chance):
        if chance:
            return
        self.ledger.lose(actor)
        assert not any(e.actor == actor for e in self.ledger.open.values())

    # -------------------------------------------------------------- scorers

    @precondition(lambda self: len(self.ledger.scoring))
    @rule(
        scorer=st.sampled_from(SCORERS), data=st.data(), fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=6)
    )
    def score(self, scorer, data, fates):
        """A scorer leases some groups; some it annotates, well or badly, some it fails, some it keeps."""
        stage = data.draw(st.sampled_from(self.rules.stages))
        queue = self.ledger.scoring.queues[stage]
        for fate in fates:
            waiting = queue.waiting
            is_suspect = queue.leases[scorer] > 0 and any(work.deaths for work in queue._works.values())
            group = self.ledger.lease(stage, scorer, self.now)
            assert (group is not None) == (waiting > 0) or is_suspect
            if group is not None:
                self.leased.append((scorer, stage, group))
                new_try = (scorer, stage, group.ordinal)
                self.annotated = [(s, a) for s, a in self.annotated if (s, a.stage, a.ordinal) != new_try]
                if fate != "keep":
                    self.meet(len(self.leased) - 1, fate)

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), fate=st.sampled_from(FATES))
    def go_on_scoring(self, data, fate):
        """What was kept is answered at last, in time or not."""
        if fate != "keep":
            self.meet(data.draw(st.integers(0, len(self.leased) - 1)), fate)

    def meet(self, index: int, fate: str) -> None:
        scorer, stage, group = self.leased.pop(index)
        if fate in ("fail", "give up"):
            before, key = self.ledger.failed.copy(), (group.ordinal, group.attempt)
            self.ledger.fail_stage(scorer, stage, *key, "broken", self.now, final=fate == "give up")
            assert self.ledger.failed == before
        elif fate == "bad":
            values = np.float32([math.nan])
            self.say(scorer, Annotation(ordinal=group.ordinal, attempt=group.attempt, stage=stage, values=values))
        else:
            self.say(scorer, annotation(group, stage, {"good": 0.5, "equal": 0.0, "nan": math.nan}[fate]))

    def say(self, scorer: str, item: Annotation) -> None:
        """Whatever a scorer does, no attempt fails because of it and nothing is generated again."""
        before = (self.ledger.failed.copy(), len(self.ledger.retry))
        self.ledger.annotate(scorer, item, self.now)
        assert (self.ledger.failed, len(self.ledger.retry)) == before
        self.annotated.append((scorer, item))

    @precondition(lambda self: self.annotated)
    @rule(data=st.data())
    def annotate_again(self, data):
        scorer, item = data.draw(st.sampled_from(self.annotated[-10:]))
        before = self.ledger.books()
        assert not self.ledger.annotate(scorer, item, self.now).fresh
        assert self.ledger.books() == before

    @precondition(lambda self: self.leased)
    @rule(scorer=st.sampled_from(SCORERS), died=st.booleans())
    def scorer_dies(self, scorer, died):
        before = self.ledger.books()
        _, deadly = self.ledger.lose_scorer(scorer, died=died)
        self.leased = [work for work in self.leased if work[0] != scorer]
        before["scoring"] -= len(deadly)
        before["filtered"] += len(deadly)
        assert self.ledger.books() == before
        assert died or not deadly
        assert not any(queue.leases[scorer] for queue in self.ledger.scoring.queues.values())

    def score_all(self) -> None:
        for stage in self.rules.stages:
            while (group := self.ledger.lease(stage, "z", self.now)) is not None:
                self.say("z", annotation(group, stage, 0.5))

    # -------------------------------------------------------------- time

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 4.0, 11.0]))
    def pass_time(self, seconds):
        self.now += seconds
        self.ledger.expire(self.now)
        assert all(self.now - e.issued_at <= 10.0 for e in self.ledger.open.values())

    @rule(step_waits=st.booleans())
    def watch(self, step_waits):
        scoring = len(self.ledger.scoring)
        self.ledger.watch(self.now, step_waits=step_waits)
        assert len(self.ledger.scoring) == scoring

    # -------------------------------------------------------------- learner

    @rule()
    def deliver(self):
        delivery = self.ledger.deliver()
        if delivery is None:
            return
        assert len(delivery.groups) == self.rules.groups_per_step
        assert [g.ordinal for g in delivery.groups] == sorted({g.ordinal for g in delivery.groups})
        assert all(age(g, delivery.step) <= self.rules.max_staleness for g in delivery.groups)
        if self.rules.stragglers == "wait":
            assert not delivery.lost
        self.batches[delivery.step] = delivery.groups

    @precondition(lambda self: self.ledger.version in self.batches)
    @rule()
    def train(self):
        step = self.ledger.version
        self.batches.pop(step)
        self.rows.append(batch_row(step, self.ledger.delivered[step]))
        self.ledger.train(step)

    @rule(data=st.data(), count=st.integers(1, 4))
    def finish_youngest(self, data, count):
        """Later tickets overtake earlier ones, which is what makes stragglers."""
        for key in sorted(self.held, key=lambda k: (-self.held[k][1].version, -k[0]))[:count]:
            self.send(*self.finish(key))
        self.go_on(data, 0, data.draw(st.sampled_from(ACTORS)))

    @rule(data=st.data(), count=st.integers(1, 4), actor=st.sampled_from(ACTORS))
    def go_on(self, data, count, actor):
        """The usual course in one event, so that long histories are reached: submit some, step, commit, issue."""
        for _ in range(min(count, len(self.held))):
            self.send(*self.finish(data.draw(st.sampled_from(sorted(self.held)))))
        if data.draw(st.booleans()):
            self.score_all()
        self.deliver()
        if self.ledger.version in self.batches:
            self.train()
        self.commit(actor)
        self.issue(actor, 8)

    def finish(self, key: tuple[int, int]) -> tuple[str, Group]:
        actor, ticket = self.held.pop(key)
        return actor, answer(ticket)

    # -------------------------------------------------------------- crash

    @rule()
    def save(self):
        self.checkpoint = self.plain()

    def resumed(self, frozen: Frozen) -> Ledger:
        return thaw(frozen, self.rules, task_of)

    @rule(chance=RARELY, just_saved=st.booleans())
    def crash(self, chance, just_saved):
        if chance:
            return
        if just_saved:
            self.save()
        self.ledger = self.resumed(self.checkpoint)
        self.rows = [row for row in self.rows if row["step"] < self.ledger.version]
        self.live = dict.fromkeys(ACTORS, self.ledger.version)
        self.held, self.sent, self.batches = {}, [], {}
        self.leased, self.annotated = [], []

    # -------------------------------------------------------------- invariants

    def entries(self) -> list[Any]:
        books = self.ledger
        delivered = [e for batch in books.delivered.values() for e in batch]
        return [*books.open.values(), *books.scoring.values(), *books.ready.values(), *delivered]

    @invariant()
    def the_books_close(self):
        books = self.ledger.books()
        assert books.pop("issued") == sum(books.values())
        assert all(n >= 0 for n in books.values())

    @invariant()
    def every_ordinal_is_in_one_place(self):
        places = [e.ordinal for e in self.entries()] + [o for o, *_ in self.ledger.retry]
        assert len(places) == len(set(places))
        assert all(o < self.ledger.next_ordinal for o in places)

    @invariant()
    def no_ordinal_is_trained_too_often(self):
        assert all(n <= self.rules.max_uses for n in self.uses.values())

    @invariant()
    def capacity_and_bytes_are_released(self):
        assert self.ledger.held_bytes == sum(e.nbytes for e in self.entries())
        open_by_actor = Counter(e.actor for e in self.ledger.open.values())
        assert +self.ledger.leases == open_by_actor

    @invariant()
    def what_is_ready_is_annotated_and_what_is_not_awaits_something(self):
        books, stages = self.ledger, self.rules.stages
        delivered = [e for batch in books.delivered.values() for e in batch]
        for entry in [*books.ready.values(), *delivered]:
            assert np.isfinite(entry.payload.rewards).all()
            assert ("ref_logprobs" in entry.payload.arrays) == ("reference" in stages)
        awaiting = {ordinal for queue in books.scoring.queues.values() for ordinal in queue._works}
        assert {e.ordinal for e in books.scoring.values()} == awaiting
        for queue in books.scoring.queues.values():
            holders = Counter(work.scorer for work in queue._works.values() if work.scorer)
            assert +queue.leases == holders
            assert queue.waiting == len(queue._works) - holders.total()

    @invariant()
    def nothing_waits_that_is_too_old(self):
        assert all(e.deadline >= self.ledger.next_step for e in self.ledger.ready.values())
        if self.rules.stragglers == "wait":
            assert not self.ledger.failed["too_old"]
            assert not self.ledger.failed["straggler"]

    def teardown(self):
        """Liveness: when all actors behave, every step becomes deliverable, and the books close at the end."""
        if not hasattr(self, "ledger"):
            return
        books = self.ledger
        for _ in range(200):
            if books.version == self.rules.steps:
                break
            for actor in ACTORS:
                self.live[actor] = books.version
                while (ticket := books.issue(actor, self.live[actor], self.now)) is not None:
                    self.held[ticket.ordinal, ticket.attempt] = (actor, ticket)
            for entry in list(books.open.values()):
                _, ticket = self.held.pop(entry.key)
                self.send(entry.actor, answer(ticket))
            for scorer in SCORERS:
                books.lose_scorer(scorer, died=False)
            self.score_all()
            self.deliver()
            if books.version in self.batches:
                self.train()
        assert books.version == self.rules.steps
        books.close("run_ended")
        self.the_books_close()
        assert books.held_bytes == 0
        assert books.outstanding == 0
        assert self.uses.total() == self.rules.steps * self.rules.groups_per_step
        if self.rules.max_uses == 1:
            assert books.trained == self.uses.total()


Schedule.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestSchedule = Schedule.TestCase
