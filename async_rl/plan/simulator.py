"""A run in virtual time: the ledger of real runs, with actors and a learner that only take time.

    ┌───── version (after weights_s) ◄── train ◄── step_s, publish_s ◄── deliver, ahead ◄┐
    ▼                                                                                    │
  actors ── end of a sequence ─► group complete ─► Ledger.submit ─► pump ────────────────┤
    ▲                                                                   └─► Ledger.issue ┐
    └──────────────────────────────── ticket, to who holds the fewest ◄──────────────────┘

Sequences have the lengths that the mock engine would draw for the same tickets (:func:`async_rl.lengths.request_rng`).
Time jumps from event to event; nothing is done between two. What an event makes possible is handed out at once, in the
server's order: the step's batch, then tickets (:meth:`async_rl.buffer.service.Service.pump`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from enum import IntEnum

import numpy as np

from async_rl.buffer.ledger import Ledger
from async_rl.buffer.records import Delivery, Lost
from async_rl.buffer.sharding import assign
from async_rl.errors import ConfigError
from async_rl.lengths import request_rng
from async_rl.plan.actor import Actor, Work
from async_rl.plan.asking import Asking
from async_rl.plan.outcome import Outcome
from async_rl.plan.scenario import Scenario
from async_rl.plan.standins import StandIns, rules_of


class _Event(IntEnum):
    end = 0
    """A sequence of an actor ends."""
    resume = 1
    """An actor's pause is over."""
    trained = 2
    version = 3
    """The newest version reaches the actors."""
    tick = 4


class Simulator:
    """One run; use it once.

    Args:
        scenario: what is simulated.
        slow_steps: so many at first take twice as long, so that the buffer fills. In a balanced system its level is a
            random walk that long remembers where it began.
    """

    def __init__(self, scenario: Scenario, slow_steps: int = 0) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.ledger = Ledger(rules_of(scenario), lambda ordinal: 0)
        self.begun: list[float] = []
        """When the learner began each step."""
        self._batches: deque[Delivery] = deque()
        """Delivered, not begun."""
        self._rng = np.random.default_rng(scenario.seed)
        self._slow_steps = slow_steps
        self._names = {f"actor-{i}": i for i in range(scenario.actors)}
        token_s, drains = 1 / scenario.speeds.slot_tokens_per_s, scenario.weight_updates == "drained"
        size = scenario.rules.group_size
        self._actors = [
            Actor(name, slots=scenario.slots, group_size=size, token_s=token_s, drains=drains) for name in self._names
        ]
        self._asking = Asking(self._actors, self.ledger)
        self._events: list[tuple[float, int, _Event, int]] = []
        self._order = 0
        self._works: dict[int, Work] = {}
        """By ordinal: what is open or held by the ledger."""
        self._stand_ins = StandIns()
        self._learns = False
        self._slots_active = self._actors_active = 0
        self._busy: defaultdict[str, float] = defaultdict(float)
        """Seconds: ``learner``, ``slots``, ``actors``."""
        self._ages: Counter[int] = Counter()
        self._window = range(0)
        """Steps that are counted."""

    def run(self, warmup: int, steps: int) -> Outcome:
        """Simulate until step ``warmup + steps`` begins; what comes before step ``warmup`` is not counted.

        Raises:
            ConfigError: such a run would not go on: its watchdog would end it.
        """
        self._window = range(warmup, warmup + steps)
        for index in range(len(self._actors)):
            self._asking.ask(index)
        self._push(self._tick_s, _Event.tick)
        self._pump()
        while len(self.begun) <= warmup + steps:
            self._next()
        return self._outcome()

    @property
    def _tick_s(self) -> float:
        return min(self.ledger.rules.lease_s, self.ledger.rules.watchdog_s) / 4

    # ------------------------------------------------------------------ events

    def _push(self, time: float, kind: _Event, index: int = -1) -> int:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, kind, index))
        return self._order

    def _next(self) -> None:
        time, order, kind, index = heapq.heappop(self._events)
        if kind == _Event.end and self._actors[index].scheduled != order:
            return
        passed_s, self.now = time - self.now, time
        self._busy["learner"] += passed_s * self._learns
        self._busy["slots"] += passed_s * self._slots_active
        self._busy["actors"] += passed_s * self._actors_active
        if kind == _Event.end:
            self._end(index)
        elif kind == _Event.resume:
            self._resume(index)
        elif kind == _Event.trained:
            self._train()
        elif kind == _Event.version:
            self._arrive()
        else:
            self._tick()

    def _end(self, index: int) -> None:
        """Sequences of an actor end; the groups that are complete by that are submitted."""
        actor = self._actors[index]
        before = actor.active
        complete = actor.end(actor.next_end)
        for work in complete:
            self._submit(actor, work)
        self._settle(index, before)
        self._asking.ask(index)
        self._pump()

    def _resume(self, index: int) -> None:
        actor = self._actors[index]
        actor.stopped += self.scenario.speeds.pause_s
        actor.swap(self._local(actor))
        actor.resume(self._local(actor))
        self._settle(index, 0)
        self._asking.ask(index)
        self._pump()

    def _train(self) -> None:
        self.ledger.train(self.ledger.version)
        self._learns = False
        if self.scenario.speeds.weights_s > 0:
            self._push(self.now + self.scenario.speeds.weights_s, _Event.version)
        else:
            self._arrive()
        self._pump()

    def _arrive(self) -> None:
        for index, actor in enumerate(self._actors):
            actor.newest = self.ledger.version
            self._settle(index, actor.active)
        self._pump()

    def _tick(self) -> None:
        """What the server looks for now and then: leases that ran out, a run that does not go on."""
        self._push(self.now + self._tick_s, _Event.tick)
        overdue = self.ledger.watch(self.now, step_waits=not self._learns)
        if overdue is not None and overdue.exhausted:
            rules = self.ledger.rules
            raise ConfigError(
                f"such a run would end by its watchdog: no group became ready for {overdue.round} × "
                f"{rules.watchdog_s:g} s; raise buffer.lease_s ({rules.lease_s:g}) and buffer.watchdog_s, or "
                "let answers be shorter"
            )
        self._cancel(overdue.lost if overdue else ())
        self._cancel(self.ledger.expire(self.now))
        self._pump()

    # ------------------------------------------------------------------ actors

    def _local(self, actor: Actor) -> float:
        return self.now - actor.stopped

    def _settle(self, index: int, before: int) -> None:
        """After a change: swap weights if that can be done now, know who generates, and when it ends.

        Args:
            index: of the actor.
            before: slots of it that generated before the change.
        """
        actor = self._actors[index]
        if actor.is_ready_to_swap:
            if self.scenario.speeds.pause_s > 0:
                actor.paused = True
                self._push(self.now + self.scenario.speeds.pause_s, _Event.resume, index)
            else:
                actor.swap(self._local(actor))
                actor.resume(self._local(actor))
                self._asking.ask(index)
        self._slots_active += actor.active - before
        self._actors_active += bool(actor.active) - bool(before)
        due = actor.next_end + actor.stopped if actor.active else math.inf
        if due != actor.due:
            actor.due = due
            actor.scheduled = self._push(due, _Event.end, index) if actor.active else -1

    def _submit(self, actor: Actor, work: Work) -> None:
        ticket, is_useless = work.ticket, False
        if self.scenario.speeds.filtered:
            is_useless = self._rng.random() < self.scenario.speeds.filtered
        group = self._stand_ins.group(ticket, min(work.tokens), max(work.tokens), useless=is_useless)
        outcome = self.ledger.submit(actor.name, group, self.now).outcome
        if outcome not in ("accepted", "filtered"):
            raise RuntimeError(f"the ledger calls ordinal {ticket.ordinal} attempt {ticket.attempt} {outcome}")

    def _cancel(self, lost: Iterable[Lost]) -> None:
        """Tickets were taken back: their holders stop."""
        for item in lost:
            index = self._names[item.actor]
            actor = self._actors[index]
            before = actor.active
            actor.drop(self._works[item.ordinal], self._local(actor))
            self._settle(index, before)
            self._asking.ask(index)

    # ------------------------------------------------------------------ what the server hands out

    def _pump(self) -> None:
        while True:
            if self._batches and not self._learns:
                self._begin(self._batches.popleft())
            asks = not self._batches and (self.scenario.asks_ahead or not self._learns)
            delivery = self.ledger.deliver() if asks else None
            if delivery is None:
                break
            self._cancel(delivery.lost)
            self._batches.append(delivery)
        while (index := self._asking.next()) is not None:
            self._issue(index)

    def _begin(self, delivery: Delivery) -> None:
        """The learner has a batch."""
        self.begun.append(self.now)
        works = {g.ordinal: self._works[g.ordinal] for g in delivery.groups}
        if delivery.step == self._window.start:
            self._busy.clear()
        for work in works.values() if delivery.step in self._window else ():
            for version, count in work.tokens.items():
                self._ages[delivery.step - version] += count
        ledger = self.ledger
        kept = {g.ordinal for batch in self._batches for g in batch.groups} | works.keys()
        self._works = {o: w for o, w in self._works.items() if o in kept or o in ledger.open or o in ledger.ready}
        self._learns = True
        step_s = self.scenario.speeds.step_s * (2 if delivery.step < self._slow_steps else 1)
        if self.scenario.imbalance:
            step_s *= self._imbalance(list(works.values()))
        self._push(self.now + step_s + self.scenario.speeds.publish_s, _Event.trained)

    def _imbalance(self, works: list[Work]) -> float:
        """Tokens of the fullest rank / their mean."""
        lengths, ranks = [w.length for w in works], self.scenario.ranks
        loads = [0] * ranks
        for length, (_, rank) in zip(lengths, assign(lengths, 1, ranks), strict=True):
            loads[rank] += length
        return max(loads) * ranks / sum(lengths)

    def _issue(self, index: int) -> None:
        actor = self._actors[index]
        ticket = self.ledger.issue(actor.name, actor.version, self.now)
        if ticket is None:
            raise RuntimeError(f"no ticket for {actor.name}, although there was room")
        size = self.scenario.rules.group_size
        work = self._works[ticket.ordinal] = Work(ticket, size)
        noise = request_rng((self.scenario.seed, ticket.ordinal, ticket.draw))
        before = actor.active
        actor.take(work, self.scenario.lengths.draw(noise, size).tolist(), self._local(actor))
        self._settle(index, before)
        self._asking.ask(index)

    def _outcome(self) -> Outcome:
        first, last = self._window.start, self._window.stop
        seconds, steps = self.begun[last] - self.begun[first], last - first
        books = self.ledger.books()
        lost = books["filtered"] + books["failed"]
        return Outcome(
            learner=self._busy["learner"] / seconds,
            actors=self._busy["slots"] / (seconds * self.scenario.actors * self.scenario.slots),
            actors_awake=self._busy["actors"] / (seconds * self.scenario.actors),
            tokens_per_s=sum(self._ages.values()) / seconds,
            step_s=seconds / steps,
            ages=dict(self._ages),
            lost=lost / (lost + books["trained"]),
            books=books,
            steps=steps,
        )
