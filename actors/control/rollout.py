"""The rollout of environments: tickets in, fragments or episodes out, weights swapped between two environment steps.

    server ──tickets──► waiting ─► gatherer ⇄ environment, policy ──groups──► server

One ``_work`` of the loop (:mod:`actors.loop`) is one environment step for the ticket in hand.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from actors.control.collector import EnvironmentFault, Gatherer
from actors.control.policy import Policy
from actors.loop import TicketLoop
from actors.receiver import Receiver
from actors.streak import MAX_FAILURES, Streak
from async_rl.client import Client
from async_rl.config import ControlConfig
from async_rl.data import Group
from async_rl.protocol import Ticket
from async_rl.timer import StateTimer

_WANTED = 2
"""Tickets that it holds at most: one in hand, and the next, so that it never waits for one that it may have."""


@dataclass(frozen=True, slots=True)
class Held:
    """A ticket, and since when."""

    ticket: Ticket
    since: float

    @property
    def key(self) -> tuple[int, int]:
        """Ordinal and attempt."""
        return self.ticket.ordinal, self.ticket.attempt


class Rollout(TicketLoop):
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
        super().__init__(name=name, client=client, holder=policy, receiver=receiver, timer=timer)
        self._config, self._policy, self._gatherer = config, policy, gatherer
        self._in_hand: Held | None = None
        self._waiting: deque[Held] = deque()
        self._failures = Streak(client, f"the environment failed {MAX_FAILURES} times in a row")
        self.counts.update(env_steps=0, environment_failures=0)
        self._last_step = time.monotonic()

    def info(self) -> dict[str, Any]:
        """Counters, and how long ago the environments made a step."""
        return {**super().info(), "last_step_s": round(time.monotonic() - self._last_step, 3)}

    def _held(self) -> list[Held]:
        in_hand = self._in_hand
        return [*([in_hand] if in_hand else []), *self._waiting]

    def _room(self) -> int:
        return _WANTED - len(self._held())

    def _take(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._cancel([h.key for h in self._held() if h.ticket.ordinal == ticket.ordinal])
            self._waiting.append(Held(ticket, time.monotonic()))

    def _cancel(self, keys: Iterable[tuple[int, int]]) -> None:
        """Give tickets up; the environments stay where they are."""
        gone = set(keys)
        self._waiting = deque(h for h in self._waiting if h.key not in gone)
        if self._in_hand is not None and self._in_hand.key in gone:
            self._gatherer.drop()
            self._in_hand = None

    def _is_idle(self) -> bool:
        return not (self._policy.proven and (self._in_hand or self._waiting))

    def _work(self) -> None:
        """One environment step for the ticket in hand; nothing is sampled by what is not proven."""
        if self._stop is not None or self._is_idle():
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
        self._failures.clear()
        seconds = round(time.monotonic() - in_hand.since, 4)
        self._client.send_groups([replace(group, meta={**group.meta, "actor": self._name, "seconds": seconds})])

    def _fail(self, fault: EnvironmentFault) -> None:
        """Another attempt is made at the ticket; again and again, the environment itself is broken."""
        in_hand, self._in_hand = self._in_hand, None
        assert in_hand is not None
        print(f"{self._name}: {fault}", flush=True)
        self.counts["environment_failures"] += 1
        self._give_up(in_hand.ticket, fault.reason, str(fault), final=False)
        self._failures.add(fault.reason, str(fault))

    def _wait(self, selector: selectors.BaseSelector) -> None:
        self._timer.enter("waiting_weights" if self._swap.behind else "waiting_ticket")
        selector.select(self._config.buffer.heartbeat_s)
