"""The rollout loop of one actor: tickets in, scored groups out, weights swapped between two decode steps.

    server ──tickets──► player ──requests──► engine ──completions──► player ──groups──► server
       │                  └── verifiers, or environments between two turns ──┘
       └────version───► receiver (prepares in its thread) ──► engine.load_weights ──live──► server

| part           | consumes      | produces        | waits for                  | unblocked by                    |
|----------------|---------------|-----------------|----------------------------|---------------------------------|
| ``_handle``      | messages      | jobs            | nothing                    |                                 |
| ``swap.commit``  | prepared weights | ``live``       | nothing                    |                                 |
| ``_generate``    | requests      | completions     | one decode step            | the engine                      |
| ``_submit``      | results       | groups          | nothing                    |                                 |
| ``_rest``        | nothing       | ``asleep``       | nothing                    | colocated: a version  |
| ``_wait``        | nothing       | nothing         | any descriptor, a heartbeat | message, weights, verdict, token |

Everything runs in one thread; only the client's socket, the receiver's transfers, verifiers and environments are
elsewhere.
"""

from __future__ import annotations

import math
import selectors
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from actors.engines.base import Engine
from actors.players.submission import group_of, outcomes_of
from actors.players.work import Failed, Job, Player, Work
from actors.receiver import Receiver
from actors.swap import WeightSwap
from async_rl.client import Client
from async_rl.config import Config
from async_rl.protocol import Ticket
from async_rl.tasks import Problem
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest
from async_rl.wire import Header

MAX_VERIFIER_FAILURES = 16
"""So many failures in a row mean that the verifier itself is broken: the run ends and says so."""
MAX_FAILURES = {"verifier": MAX_VERIFIER_FAILURES, "environment": 16}
"""The same for each part that is the user's code."""
MAX_REFUSED = 256
"""So many prompts in a row that the engine refuses mean that hardly any fits the model: the run ends and says so."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the loop ended."""

    reason: str
    error: bool


class Rollout:
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
        self._config, self._name = config, name
        self._client, self._engine, self._receiver, self._player = client, engine, receiver, player
        self._problems, self._timer = problems, timer
        self._works: dict[Job, Work] = {}
        self._stop: Stop | None = None
        self._offered = 0
        self._failures: Counter[str] = Counter()
        """Times in a row that something failed, by source."""
        self._worked = self._asleep = False
        """Colocated: whether there were tickets since the last sleep; whether the device is given back."""
        self._wanted = math.ceil(config.actors.slots / config.sampling.group_size) + 1
        self.counts: Counter[str] = Counter(generated_tokens=0, groups=0, verifier_failures=0, weights_refused=0)
        self._swap = WeightSwap(engine, receiver, client, timer, self.counts, name)
        self._last_token = time.monotonic()

    # -- what the heartbeat says; read from the client's thread

    def in_flight(self) -> list[list[float]]:
        """``[ordinal, attempt, age in seconds]`` of every ticket held."""
        now = time.monotonic()
        return [[w.ticket.ordinal, w.ticket.attempt, round(now - w.since, 3)] for w in list(self._works.values())]

    def info(self) -> dict[str, Any]:
        """Counters, and how long ago the engine produced a token."""
        return {
            **self.counts,
            "version": self._engine.version,
            "running": self._engine.num_running,
            "last_token_s": round(time.monotonic() - self._last_token, 3),
        }

    # -- the loop

    def run(self, first: Manifest | None) -> Stop:
        """Roll out until the server stops us.

        Args:
            first: newest version at the handshake; None: it is announced later.

        Raises:
            DeadlineError: the server has gone silent.
            WeightsError: the engine cannot hold what is published.
        """
        if first is not None:
            self._announce(first)
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._client.fileno(), self._receiver.fileno(), self._engine.fileno()):
                if descriptor is not None:
                    selector.register(descriptor, selectors.EVENT_READ)
            while self._stop is None:
                self._handle(self._client.receive(0.0))
                self._swap.commit()
                self._generate()
                self._submit()
                self._rest()
                self._offer()
                if self._idle():
                    self._wait(selector)
        return self._stop

    def _handle(self, messages: list[tuple[Header, list[Any]]]) -> None:
        for header, _ in messages:
            kind = header["type"]
            if kind == "tickets":
                self._accept([Ticket.from_wire(t) for t in header["tickets"]])
            elif kind == "version":
                self._announce(Manifest.from_wire(header["manifest"]))
            elif kind == "cancel":
                self._cancel([(int(o), int(a)) for o, a in header["tickets"]])
            elif kind == "stop":
                self._stop = Stop(str(header["reason"]), bool(header["error"]))

    def _accept(self, tickets: list[Ticket]) -> None:
        self._offered = max(0, self._offered - len(tickets))
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
            self._player.begin(work)

    def _cancel(self, tickets: list[tuple[int, int]]) -> None:
        for ordinal, attempt in tickets:
            work = self._generated_for(ordinal)
            if work is not None and work.ticket.attempt == attempt:
                self._drop(work)

    def _generated_for(self, ordinal: int) -> Work | None:
        return next((w for w in self._works.values() if w.id == ordinal and not w.generated), None)

    def _drop(self, work: Work) -> None:
        self._player.drop(work)
        del self._works[work]

    def _announce(self, manifest: Manifest) -> None:
        if self._asleep:
            self._engine.wake()
            self._asleep = False
        self._swap.announce(manifest)

    def _generate(self) -> None:
        """One decode step; an engine that works elsewhere is asked though it is idle: it may have failed."""
        decodes = self._engine.proven and self._engine.num_running > 0
        if not decodes and self._engine.fileno() is None:
            return
        if decodes:
            self._timer.enter("generating")
        completions = self._engine.step(0.0)
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
                self._fail(work.ticket, result)
            else:
                groups.append(group_of(work, result.rewards, self._name, self._config))
                self.counts.update(outcomes_of(work))
        if groups:
            self.counts["groups"] += len(groups)
            self._failures.clear()
            self._client.send_groups(groups)
        self._look_at(failed)

    def _fail(self, ticket: Ticket, failed: Failed) -> None:
        self.counts[f"{failed.source}_failures"] += 1
        self._client.send(
            "fail",
            ordinal=ticket.ordinal,
            attempt=ticket.attempt,
            reason=failed.reason,
            detail=failed.detail[-2000:],
            final=failed.final,
        )

    def _look_at(self, failed: list[Failed]) -> None:
        """End the run when one source fails again and again; what fails in the same moment has one cause."""
        for failure in {f.source: f for f in failed}.values():
            self._failures[failure.source] += 1
            if self._failures[failure.source] == MAX_FAILURES.get(failure.source):
                self._client.send(
                    "fatal",
                    reason=f"the {failure.source} failed {MAX_FAILURES[failure.source]} times in a row "
                    f"({failure.outcome}); the last: {failure.detail}",
                )
            elif failure.source == "prompt" and self._player.refused >= MAX_REFUSED:
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

    def _offer(self) -> None:
        """Tell the server how many tickets we could take now; only when that number has grown."""
        if self._engine.version < 0:
            return
        count = max(0, self._wanted - sum(not w.generated for w in self._works.values()))
        if count > self._offered:
            self._offered = count
            self._client.send("credit", count=count)

    def _idle(self) -> bool:
        working_here = self._engine.fileno() is None and self._engine.num_running > 0
        return self._stop is None and not (self._engine.proven and working_here)

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
