"""The loop of an actor, the same for all domains: tickets in, groups out, weights swapped between two steps of work.

    server ──tickets──► take ─► work ──groups──► server
       └────version───► receiver (prepares in its thread) ──► holder.load_weights ──live──► server

| part            | consumes         | produces       | waits for                   | unblocked by           |
|-----------------|------------------|----------------|-----------------------------|------------------------|
| ``_handle``     | messages         | tickets        | nothing                     |                        |
| ``swap.commit`` | prepared weights | ``live``       | nothing                     |                        |
| ``_work``       | tickets          | groups         | one step of a domain        | engine, environment    |
| ``_offer``      | nothing          | ``credit``     | nothing                     |                        |
| ``_wait``       | nothing          | nothing        | any descriptor, a heartbeat | message, weights, work |

Everything runs in one thread; only the client's socket, the receiver's transfers and what a domain has in child
processes are elsewhere.
"""

from __future__ import annotations

import selectors
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from actors.credit import Credit
from actors.process import Stop
from actors.receiver import Receiver
from actors.streak import MAX_FAILURES, Streak, is_useful
from actors.swap import Holder, WeightSwap
from async_rl.client import Client
from async_rl.protocol import Ticket
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest
from async_rl.weights.offer import Offer
from async_rl.weights.tree import Parent
from async_rl.wire import Header


class Held(Protocol):
    """What is held for a ticket."""

    @property
    def ticket(self) -> Ticket:
        """The ticket."""

    @property
    def since(self) -> float:
        """``time.monotonic()`` at which it came."""


class TicketLoop(ABC):
    """Works on tickets until the server says stop; a domain says how.

    Args:
        name: of the process.
        client: the line to the server.
        holder: holds the weights that the work is done with.
        receiver: prepares their versions.
        timer: told what it does.
        filenos: descriptors, beside those of client and receiver, that end a wait.
    """

    def __init__(
        self,
        *,
        name: str,
        client: Client,
        holder: Holder,
        receiver: Receiver,
        timer: StateTimer,
        filenos: Sequence[int] = (),
    ) -> None:
        self._name, self._client, self._holder, self._timer = name, client, holder, timer
        self._filenos = (client.fileno(), receiver.fileno(), *filenos)
        self._stop: Stop | None = None
        self._credit = Credit(client)
        self._refused = Streak(client, f"the server refused {MAX_FAILURES} groups in a row")
        self.counts: Counter[str] = Counter(groups=0, weights_refused=0)
        self._receiver = receiver
        self._swap = WeightSwap(holder, receiver, client, timer, self.counts, name)

    # -- what a domain says

    @abstractmethod
    def _held(self) -> Sequence[Held]:
        """All that is held; read from the client's thread, too."""

    @abstractmethod
    def _room(self) -> int:
        """How many more tickets it could take now."""

    @abstractmethod
    def _take(self, tickets: list[Ticket]) -> None:
        """Tickets came; a fresh attempt at what is still worked on replaces it."""

    @abstractmethod
    def _cancel(self, keys: list[tuple[int, int]]) -> None:
        """Give up the tickets with these ordinals and attempts; they have moved on."""

    @abstractmethod
    def _work(self) -> None:
        """One step; nothing is sampled with weights that are not proven."""

    def _may_swap(self) -> bool:
        """Whether a prepared version may be taken now."""
        return True

    @abstractmethod
    def _is_idle(self) -> bool:
        """Whether another step would find nothing to do."""

    @abstractmethod
    def _wait(self, selector: selectors.BaseSelector) -> None:
        """Sleep until something happens, at most one heartbeat."""

    # -- what the heartbeat says; read from the client's thread

    def in_flight(self) -> list[list[float]]:
        """``[ordinal, attempt, age in seconds]`` of every ticket held."""
        now = time.monotonic()
        return [[h.ticket.ordinal, h.ticket.attempt, round(now - h.since, 3)] for h in self._held()]

    def info(self) -> dict[str, Any]:
        """Counters, and the version that is held."""
        return {**self.counts, "version": self._holder.version}

    # -- the loop

    def run(self, first: Manifest | None) -> Stop:
        """Work until the server stops us.

        Args:
            first: newest version at the handshake; None: it is announced later.

        Raises:
            DeadlineError: the server has gone silent.
            WeightsError: the holder cannot hold what is published.
        """
        if first is not None:
            self._announce(first)
        with selectors.DefaultSelector() as selector:
            for descriptor in self._filenos:
                selector.register(descriptor, selectors.EVENT_READ)
            while self._stop is None:
                self._handle(self._client.receive(0.0))
                self._swap.commit(self._may_swap)
                self._work()
                self._offer()
                if self._stop is None and self._is_idle():
                    self._wait(selector)
        return self._stop

    def _handle(self, messages: list[tuple[Header, list[Any]]]) -> None:
        for header, _ in messages:
            kind = header["type"]
            if kind == "tickets":
                tickets = [Ticket.from_wire(t) for t in header["tickets"]]
                self._credit.use(len(tickets))
                self._take(tickets)
            elif kind == "offer":
                self._swap.expect(Offer.from_wire(header))
            elif kind == "version":
                self._announce(Manifest.from_wire(header["manifest"]))
            elif kind == "parents":
                parents = [Parent(str(address), int(depth)) for address, depth in header["parents"]]
                self._receiver.follow(parents, leads=bool(header["leads"]))
            elif kind == "ack":
                self._hear(header["results"])
            elif kind == "cancel":
                self._cancel([(int(o), int(a)) for o, a in header["tickets"]])
            elif kind == "stop":
                self._stop = Stop.from_wire(header)

    def _announce(self, manifest: Manifest) -> None:
        self._swap.announce(manifest)

    def _hear(self, results: list[tuple[int, int, str, str]]) -> None:
        """What became of the groups; one after the other refused means that the learner can use none of ours."""
        for ordinal, attempt, outcome, reason in results:
            if is_useful(outcome, reason):
                self._refused.clear()
            elif outcome == "refused":
                print(f"{self._name}: the server refused ordinal {ordinal} attempt {attempt}: {reason}", flush=True)
                self._refused.add(reason, f"ordinal {ordinal} attempt {attempt}")

    def _offer(self) -> None:
        if self._holder.version >= 0:
            self._credit.offer(self._room())

    def _give_up(self, ticket: Ticket, reason: str, detail: str, *, final: bool) -> None:
        """Give a ticket back; ``final``: another attempt would end the same way."""
        self._client.send(
            "fail",
            ordinal=ticket.ordinal,
            attempt=ticket.attempt,
            reason=reason,
            detail=detail[-2000:],
            final=final,
        )
