"""The rollout of a language model: tickets in, scored groups out, weights swapped between two decode steps.

    server ──tickets──► player ──requests──► engine ──completions──► player ──groups──► server
                          └── verifiers, or environments between two turns ──┘

One ``_work`` of the loop (:mod:`actors.loop`):

| part          | consumes     | produces    | waits for       | unblocked by         |
|---------------|--------------|-------------|-----------------|----------------------|
| ``_begin``    | tickets      | requests    | drained: a swap | new weights          |
| ``_generate`` | requests     | completions | one decode step | the engine           |
| ``_submit``   | results      | groups      | nothing         |                      |
| ``_rest``     | nothing      | ``asleep``  | nothing         | colocated: a version |

Verifiers and environments are in child processes; ``_wait`` is ended by a verdict and by a token, too.
"""

from __future__ import annotations

import math
import selectors
import time
from typing import Any

from actors.engines.base import Engine
from actors.loop import TicketLoop
from actors.occupancy import Occupancy
from actors.players.submission import group_of, outcomes_of
from actors.players.work import Failed, Job, Player, Work
from actors.receiver import Receiver
from actors.streak import MAX_FAILURES, Streak
from async_rl.client import Client
from async_rl.config import Config
from async_rl.protocol import Ticket
from async_rl.tasks import Problem
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest

MAX_REFUSED = 256
"""So many prompts in a row that the engine refuses mean that hardly any fits the model: the run ends and says so."""


class Rollout(TicketLoop):
    """Drives one engine until the server says stop.

    Args:
        player: turns tickets into scored answers: single-turn or multi-turn.
        problems: of the task, by task index.
    """

    def __init__(
        self,
        *,
        config: Config,
        name: str,
        client: Client,
        engine: Engine,
        receiver: Receiver,
        player: Player,
        problems: list[Problem],
        timer: StateTimer,
    ) -> None:
        descriptor = engine.fileno()
        super().__init__(
            name=name,
            client=client,
            holder=engine,
            receiver=receiver,
            timer=timer,
            filenos=[] if descriptor is None else [descriptor],
        )
        self._config, self._engine, self._player, self._problems = config, engine, player, problems
        self._works: dict[Job, Work] = {}
        self._held_back: list[Work] = []
        """Drained: what begins with the new weights."""
        self._occupancy = Occupancy(config.actors.slots)
        self._failures = {
            source: Streak(client, f"the {source} failed {MAX_FAILURES} times in a row")
            for source in ("verifier", "environment")
        }
        """Of each part that is the user's code."""
        self._worked = self._asleep = False
        """Colocated: whether there were tickets since the last sleep; whether the device is given back."""
        self.counts.update(generated_tokens=0, verifier_failures=0)
        self._last_token = time.monotonic()

    def info(self) -> dict[str, Any]:
        """Counters, and how long ago the engine produced a token."""
        return {
            **super().info(),
            "running": self._engine.num_running,
            **self._occupancy.read(),
            "last_token_s": round(time.monotonic() - self._last_token, 3),
        }

    def _held(self) -> list[Work]:
        return list(self._works.values())

    def _room(self) -> int:
        """As many groups as fill the slots, and one that waits, so that a slot which gets free is refilled at once."""
        size = self._config.sampling.group_size
        taken = self._player.unfinished + size * len(self._held_back)
        return max(0, math.ceil((self._config.actors.slots + size - taken) / size))

    def _may_swap(self) -> bool:
        in_flight = self._config.actors.weight_updates == "in_flight"
        return in_flight or not (self._engine.proven and self._player.unfinished)

    def _take(self, tickets: list[Ticket]) -> None:
        if self._asleep:  # they crossed our message: the server takes them back
            return
        self._worked = True
        for ticket in tickets:
            old = self._generated_for(ticket.ordinal)
            if old is not None:  # a fresh attempt at what we still generate replaces it
                self._drop(old)
            work = Work(
                id=ticket.ordinal,
                problem=self._problems[ticket.task_index],
                size=ticket.group_size,
                seed=(self._config.seed, ticket.ordinal, ticket.draw),
                draw=ticket.draw,
                ticket=ticket,
                since=time.monotonic(),
            )
            self._works[work] = work
            self._held_back.append(work)
        self._begin()

    def _cancel(self, keys: list[tuple[int, int]]) -> None:
        for ordinal, attempt in keys:
            work = self._generated_for(ordinal)
            if work is not None and work.ticket.attempt == attempt:
                self._drop(work)

    def _generated_for(self, ordinal: int) -> Work | None:
        return next((w for w in self._works.values() if w.id == ordinal and not w.generated), None)

    def _drop(self, work: Work) -> None:
        if work in self._held_back:
            self._held_back.remove(work)
        else:
            self._player.drop(work)
        del self._works[work]

    def _announce(self, manifest: Manifest) -> None:
        if self._asleep:
            self._engine.wake()
            self._asleep = False
        super()._announce(manifest)

    def _work(self) -> None:
        self._begin()
        self._generate()
        self._submit()
        self._rest()

    def _begin(self) -> None:
        """Start what has come; while the engine is being drained, it waits for the new weights."""
        if self._held_back and not self._swap.is_due:
            for work in self._held_back:
                self._player.begin(work)
            self._held_back.clear()
        self._occupancy.note(self._engine.num_running if self._engine.proven else 0)

    def _generate(self) -> None:
        """One decode step; an engine that works elsewhere is asked though it is idle: it may have failed."""
        decodes = self._engine.proven and self._engine.num_running > 0
        if not decodes and self._engine.fileno() is None:
            return
        if decodes:
            self._timer.enter("generating")
        completions = self._engine.step(0.0)
        self._occupancy.note(self._engine.num_running)
        if completions:
            self._last_token = time.monotonic()
            self.counts["generated_tokens"] += sum(len(c.tokens) for c in completions)
            self._player.take(completions)

    def _submit(self) -> None:
        """Send what is finished, give up what cannot be."""
        groups, failed = [], []
        for result in self._player.poll():
            work = self._works.pop(result.job, None)
            if work is None:  # dropped a moment ago
                continue
            if isinstance(result, Failed):
                failed.append(result)
                self.counts[f"{result.source}_failures"] += 1
                self._give_up(work.ticket, result.reason, result.detail, final=result.final)
            else:
                groups.append(group_of(work, result.rewards, self._name, self._config))
                self.counts.update(outcomes_of(work))
        if groups:
            self.counts["groups"] += len(groups)
            for streak in self._failures.values():
                streak.clear()
            self._client.send_groups(groups)
        self._look_at(failed)

    def _look_at(self, failed: list[Failed]) -> None:
        """End the run when one source fails again and again; what fails in the same moment has one cause."""
        for failure in {f.source: f for f in failed}.values():
            if failure.source != "prompt":
                self._failures[failure.source].add(failure.outcome, failure.detail)
            elif self._player.refused >= MAX_REFUSED:
                self._client.send(
                    "fatal", reason=f"{MAX_REFUSED} prompts in a row were refused; the last: {failure.detail}"
                )

    def _rest(self) -> None:
        """Colocated: give the device back once everything is done that there was to do."""
        if not (self._config.actors.placement == "colocated" and self._engine.proven and self._worked) or self._works:
            return
        self._engine.sleep()
        self._timer.enter("waiting_weights")
        self._asleep, self._worked = True, False
        self._client.send("asleep")

    def _is_idle(self) -> bool:
        working_here = self._engine.fileno() is None and self._engine.num_running > 0
        return not (self._engine.proven and working_here)

    def _wait(self, selector: selectors.BaseSelector) -> None:
        """Sleep until something happens or a call passes its limit, at most one heartbeat."""
        if self._engine.num_running and self._engine.proven:
            self._timer.enter("generating")
        elif self._player.busy:
            self._timer.enter("scoring")
        elif self._swap.behind:
            self._timer.enter("waiting_weights")
        else:
            self._timer.enter("waiting_ticket")
        pipes = [selector.register(d, selectors.EVENT_READ) for d in self._player.filenos()]
        due = self._player.next_deadline
        patience = self._config.buffer.heartbeat_s
        selector.select(patience if due is None else min(patience, max(0.0, due - time.monotonic())))
        for key in pipes:
            selector.unregister(key.fileobj)
