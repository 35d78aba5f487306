"""The loop of one control actor: tickets in, fragments out, weights swapped between two environment steps.

    server ──tickets──► waiting ─► gatherer ⇄ environment, policy ──groups──► server
       └────version───► receiver (prepares in its thread) ──► policy.load_weights ──live──► server

| part            | consumes         | produces | waits for                  | unblocked by       |
|-----------------|------------------|----------|----------------------------|--------------------|
| ``_handle``     | messages         | tickets  | nothing                     |                   |
| ``swap.commit`` | prepared weights | ``live`` | nothing                     |                   |
| ``_work``       | a ticket         | a group  | one environment step        | the environment   |
| ``_wait``       | nothing          | nothing  | any descriptor, a heartbeat | message, weights  |
"""

from __future__ import annotations

import selectors
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from actors.control.collector import EnvironmentFault, Gatherer
from actors.control.policy import Policy
from actors.receiver import Receiver
from actors.rollout import MAX_FAILURES, Stop
from actors.swap import WeightSwap
from async_rl.client import Client
from async_rl.config import ControlConfig
from async_rl.data import Group
from async_rl.protocol import Ticket
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest
from async_rl.wire import Header

_WANTED = 2
"""Tickets that it holds at most: one in hand, and the next, so that it never waits for one that it may have."""

MAX_REFUSED = 16
"""So many groups in a row that the server refuses mean that it will take none: the run ends and says so."""


@dataclass(frozen=True, slots=True)
class Held:
    """A ticket, and since when."""

    ticket: Ticket
    since: float


class Rollout:
    """Drives one gatherer until the server says stop.

    Args:
        gatherer: makes groups of tickets with ``policy``.
    """

    def __init__(
        self,
        *,
        config: ControlConfig,
        name: str,
        client: Client,
        policy: Policy,
        receiver: Receiver,
        gatherer: Gatherer,
        timer: StateTimer,
    ) -> None:
        self._config, self._name, self._client, self._policy = config, name, client, policy
        self._receiver, self._gatherer, self._timer = receiver, gatherer, timer
        self._in_hand: Held | None = None
        self._waiting: deque[Held] = deque()
        self._stop: Stop | None = None
        self._offered = 0
        self._failures = 0
        """Times in a row that the environment failed."""
        self._refused = 0
        """Groups in a row that the server refused."""
        self.counts: Counter[str] = Counter(env_steps=0, groups=0, environment_failures=0, weights_refused=0)
        self._swap = WeightSwap(policy, receiver, client, timer, self.counts, name)
        self._last_step = time.monotonic()

    # -- what the heartbeat says; read from the client's thread

    def in_flight(self) -> list[list[float]]:
        """``[ordinal, attempt, age in seconds]`` of every ticket held."""
        now = time.monotonic()
        return [[h.ticket.ordinal, h.ticket.attempt, round(now - h.since, 3)] for h in self._held()]

    def info(self) -> dict[str, Any]:
        """Counters, and how long ago the environments made a step."""
        return {
            **self.counts,
            "version": self._policy.version,
            "last_step_s": round(time.monotonic() - self._last_step, 3),
        }

    # -- the loop

    def run(self, first: Manifest | None) -> Stop:
        """Roll out until the server stops us.

        Args:
            first: newest version at the handshake; None: it is announced later.

        Raises:
            DeadlineError: the server has gone silent.
            WeightsError: the policy cannot hold what is published.
        """
        if first is not None:
            self._swap.announce(first)
        with selectors.DefaultSelector() as selector:
            selector.register(self._client.fileno(), selectors.EVENT_READ)
            selector.register(self._receiver.fileno(), selectors.EVENT_READ)
            while self._stop is None:
                self._handle(self._client.receive(0.0))
                self._swap.commit()
                self._work()
                self._offer()
                if not self._can_work():
                    self._wait(selector)
        return self._stop

    def _handle(self, messages: list[tuple[Header, list[Any]]]) -> None:
        for header, _ in messages:
            kind = header["type"]
            if kind == "tickets":
                self._accept([Ticket.from_wire(t) for t in header["tickets"]])
            elif kind == "version":
                self._swap.announce(Manifest.from_wire(header["manifest"]))
            elif kind == "ack":
                self._hear(header["results"])
            elif kind == "cancel":
                self._drop([(int(o), int(a)) for o, a in header["tickets"]])
            elif kind == "stop":
                self._stop = Stop(str(header["reason"]), bool(header["error"]))

    def _accept(self, tickets: list[Ticket]) -> None:
        self._offered = max(0, self._offered - len(tickets))
        for ticket in tickets:  # a fresh attempt at what we still have replaces it
            self._drop([h.ticket for h in self._held() if h.ticket.ordinal == ticket.ordinal])
            self._waiting.append(Held(ticket, time.monotonic()))

    def _hear(self, results: list[tuple[int, int, str, str]]) -> None:
        """What became of the groups; one after the other refused means that this environment fits no learner."""
        for ordinal, attempt, outcome, reason in results:
            if outcome == "accepted":
                self._refused = 0
            elif outcome == "refused":
                self._refused += 1
                print(f"{self._name}: the server refused ordinal {ordinal} attempt {attempt}: {reason}", flush=True)
                if self._refused == MAX_REFUSED:
                    self._client.send(
                        "fatal", reason=f"the server refused {self._refused} groups in a row; the last: {reason}"
                    )

    def _drop(self, keys: Iterable[tuple[int, int] | Ticket]) -> None:
        """Give tickets up that have moved on; the environments stay where they are."""
        gone = {(k.ordinal, k.attempt) if isinstance(k, Ticket) else k for k in keys}
        self._waiting = deque(h for h in self._waiting if (h.ticket.ordinal, h.ticket.attempt) not in gone)
        in_hand = self._in_hand
        if in_hand is not None and (in_hand.ticket.ordinal, in_hand.ticket.attempt) in gone:
            self._gatherer.drop()
            self._in_hand = None

    def _can_work(self) -> bool:
        return self._stop is None and self._policy.proven and bool(self._in_hand or self._waiting)

    def _work(self) -> None:
        """One environment step for the ticket in hand; nothing is sampled by what is not proven."""
        if not self._can_work():
            return
        self._timer.enter("generating")
        if self._in_hand is None:
            self._in_hand = self._waiting.popleft()
            self._gatherer.begin(self._in_hand.ticket)
        try:
            self._gatherer.step()
        except EnvironmentFault as fault:
            self._fail(fault)
            return
        self._last_step = time.monotonic()
        group = self._gatherer.finished()
        if group is not None:
            self._submit(group)

    def _submit(self, group: Group) -> None:
        in_hand, self._in_hand = self._in_hand, None
        assert in_hand is not None
        actions = group.arrays["actions"]
        self.counts["env_steps"] += actions.size // actions.shape[-1]
        self.counts["groups"] += 1
        self._failures = 0
        seconds = round(time.monotonic() - in_hand.since, 4)
        self._client.send_groups([replace(group, meta={**group.meta, "actor": self._name, "seconds": seconds})])

    def _fail(self, fault: EnvironmentFault) -> None:
        """Another attempt is made at the ticket; again and again, the environment itself is broken."""
        in_hand, self._in_hand = self._in_hand, None
        assert in_hand is not None
        print(f"{self._name}: {fault}", flush=True)
        self.counts["environment_failures"] += 1
        self._failures += 1
        self._client.send(
            "fail",
            ordinal=in_hand.ticket.ordinal,
            attempt=in_hand.ticket.attempt,
            reason=fault.reason,
            detail=str(fault)[-2000:],
            final=False,
        )
        if self._failures == MAX_FAILURES["environment"]:
            self._client.send(
                "fatal", reason=f"the environment failed {self._failures} times in a row; the last: {fault}"
            )

    def _offer(self) -> None:
        """Tell the server how many tickets we could take now; only when that number has grown."""
        if self._policy.version < 0:
            return
        count = max(0, _WANTED - len(self._held()))
        if count > self._offered:
            self._offered = count
            self._client.send("credit", count=count)

    def _held(self) -> list[Held]:
        in_hand = self._in_hand
        return [*([in_hand] if in_hand else []), *self._waiting]

    def _wait(self, selector: selectors.BaseSelector) -> None:
        """Sleep until something happens, at most one heartbeat."""
        if self._stop is None:
            self._timer.enter("waiting_weights" if self._swap.behind else "waiting_ticket")
            selector.select(self._config.buffer.heartbeat_s)
