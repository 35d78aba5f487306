"""What the server does for actors: tickets out by credit, groups in, lost tickets cancelled.

credit ─► remembered ─► room in the ledger? ─► tickets      lost ─► cancel
submit, fail ─► ledger ─► rows of an ack, one for all of a turn

Colocated, a step goes to the learner only when every connected actor that was given tickets has said ``asleep``
after them (:meth:`ActorDesk.in_use`). One that is awake when there is nothing left for it gets an empty list of
tickets, which lets it sleep; one that joins, and holds no version yet, holds nothing up. A sleeper is woken by a new
version, or by the same once more when its step lacks a group and nobody is awake.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from async_rl.buffer.acks import attempts_of, row
from async_rl.buffer.fields import natural, number, numbers, shown, slug, take
from async_rl.buffer.files import RunFiles
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.post import Post
from async_rl.buffer.records import Answer, Lost
from async_rl.buffer.roster import Roster, Session
from async_rl.buffer.samples import sample_row
from async_rl.buffer.versions import Versions
from async_rl.errors import WireError
from async_rl.protocol import Ticket
from async_rl.wire import Frame, Header, decode_groups


class ActorDesk:
    """Handlers of the actors' messages.

    Args:
        ledger: the books.
        roster: the clients.
        post: where messages go.
        versions: of the weights.
        files: run folder.
        refused: counts by reason.
        colocated: actors and learner take turns on the device.
    """

    def __init__(
        self,
        ledger: Ledger,
        roster: Roster,
        post: Post,
        versions: Versions,
        files: RunFiles,
        refused: Counter[str],
        *,
        colocated: bool,
    ) -> None:
        self._ledger = ledger
        self._roster = roster
        self._post = post
        self._versions = versions
        self._files = files
        self._refused = refused
        self._colocated = colocated

    def submit(self, actor: Session, header: Header, frames: Sequence[Frame], now: float) -> None:
        """Finished groups. What cannot be decoded is refused and issued again, so that it holds no capacity."""
        try:
            groups = decode_groups(header, frames)
        except WireError as error:
            self._refuse(actor, header, error)
            return
        results = self._post.rows(actor)
        for group in groups:
            answer = self._ledger.submit(actor.name, group, now)
            results.append(row(group.ordinal, group.attempt, answer, self._refused))
            if answer.fresh and answer.outcome == "accepted":
                actor.useful = True
                sample = sample_row(group) if "reward" not in self._ledger.rules.stages else None
                if sample is not None:
                    self._files.append("samples", sample)

    def fail(self, actor: Session, header: Header) -> None:
        """An attempt that the actor gave up."""
        ordinal, attempt = natural(header, "ordinal"), natural(header, "attempt")
        final = take(header, "final", bool)
        reason = slug(header, self._ledger.filtered if final else self._ledger.failed)
        answer = self._ledger.fail(actor.name, ordinal, attempt, reason, final=final)
        detail = shown(header.get("detail", ""), 500)
        print(f"{actor.name} failed ordinal {ordinal} attempt {attempt}: {reason} {detail}", flush=True)
        self._post.rows(actor).append(row(ordinal, attempt, answer, self._refused))

    def live(self, client: Session, header: Header) -> None:
        """A version is live there once its checksum equals what was published; otherwise the client gets no work."""
        version, checksum = take(header, "version", int), take(header, "checksum", str)
        self._versions.time_commit(number(header, "transfer_s"), number(header, "commit_s"))
        self._versions.broadcasts["received"] += take(header, "broadcast", bool, False)
        self._versions.receive(client.take_received(numbers(header.get("received"))))
        if "pause_s" in header:
            self._versions.time_pause(number(header, "pause_s"))
        if self._versions.proves(version, checksum) and version <= self._ledger.version:
            client.live = version
            client.asleep = False
            if client.rejoined:  # it will say asleep once it has no tickets; without any it is told to rest
                client.worked, client.rejoined = self._ledger.leases[client.name] > 0, False
            return
        client.live = -1
        if client.role == "actor" and self._versions.is_void(take(header, "epoch", int, self._ledger.epoch), version):
            self.cancel(self._ledger.lose(client.name, "void_version"))  # they may have tokens of it
            print(f"{client.name} holds version {version}, which is void", flush=True)
            return
        print(
            f"{client.name} does not hold version {version}: its checksum {checksum[:40]!r} was not published",
            flush=True,
        )

    def leave_void(self, step: int) -> None:
        """Versions beyond ``step`` are void: who holds one gets no tickets before it has a version that is not."""
        for client in self._roster.of("actor", "evaluator"):
            if client.live > step:
                client.live = -1

    def asleep(self, actor: Session) -> None:
        """It has given its device back; tickets that were on their way to it go to others."""
        actor.live, actor.asleep, actor.worked, actor.rejoined = -1, True, False, False
        self.cancel(self._ledger.lose(actor.name, "asleep"))

    def in_use(self) -> list[str]:
        """Actors that may still use the device that the learner waits for; none where each has its own."""
        if not self._colocated:
            return []
        away = [s.name for s in self._roster.away() if s.role == "actor"]
        return away + [s.name for s in self._roster.of("actor") if s.worked or s.rejoined]

    def rest(self) -> None:
        """Let those sleep that are awake for nothing: the learner trains on their device, too."""
        for actor in self._roster.of("actor") if self._colocated else ():
            is_idle = actor.live >= 0 and not (actor.worked or actor.fenced)
            if is_idle and not self._ledger.has_room(actor.live):
                actor.worked = True
                self._post.send(actor, "tickets", tickets=[])

    def announce(self) -> None:
        """Tell all of the newest version; it wakes who sleeps, if there is work.

        A learner that begins anew may have all groups of its step: then the device is not for the actors.
        """
        newest = self._versions.newest
        has_work = newest is not None and self._ledger.has_room(newest.version)
        self._announce([s for s in self._roster.of("actor") if has_work or not s.asleep])

    def _announce(self, actors: list[Session]) -> None:
        for actor in actors:
            actor.asleep = False
        self._post.send_all(actors, "version", manifest=self._versions.wire)

    def wake(self) -> None:
        """If the present step lacks groups and nobody can make them, wake the sleepers.

        One that joins, or loads weights, is not waited for: it may never be done.
        """
        actors = self._roster.of("actor")
        sleepers = [s for s in actors if s.asleep]
        if self._versions.newest is None or not sleepers:
            return
        awake = any(s.live >= 0 and not s.fenced for s in actors)
        if not awake and self._ledger.has_room(self._versions.newest.version):
            self._announce(sleepers)

    def issue(self, now: float) -> None:
        """Give tickets to those that have credit, the one with the fewest open tickets first."""
        queue = []
        for order, actor in enumerate(self._roster.of("actor")):
            actor.fenced = actor.live >= 0 and self._versions.is_late(actor.live, now)
            if actor.credit > 0 and actor.live >= 0 and not actor.fenced:
                queue.append((self._ledger.leases[actor.name], order, actor))
        heapq.heapify(queue)
        given: dict[bytes, list[Ticket]] = defaultdict(list)
        while queue:
            leases, order, actor = heapq.heappop(queue)
            ticket = self._ledger.issue(actor.name, actor.live, now)
            if ticket is None:
                continue
            given[actor.identity].append(ticket)
            actor.credit -= 1
            actor.tickets += 1
            actor.worked = True
            if actor.credit > 0:
                heapq.heappush(queue, (leases + 1, order, actor))
        for identity, tickets in given.items():
            self._post.send(identity, "tickets", tickets=[t.to_wire() for t in tickets])

    def cancel(self, lost: Iterable[Lost]) -> None:
        """Tell the holders that they can stop."""
        by_actor: dict[str, list[list[int]]] = defaultdict(list)
        for item in lost:
            by_actor[item.actor].append([item.ordinal, item.attempt])
        for name, tickets in by_actor.items():
            actor = self._roster.named(name)
            if actor is not None:
                self._post.send(actor, "cancel", tickets=tickets)

    def _refuse(self, actor: Session, header: Header, error: WireError) -> None:
        self._refused[error.reason] += 1
        results = []
        for ordinal, attempt in attempts_of(header):
            answer = self._ledger.fail(actor.name, ordinal, attempt, error.reason, final=False)
            answer = Answer("refused", error.reason) if answer.outcome == "failed" else answer
            results.append([ordinal, attempt, answer.outcome, answer.reason])
        if not results:
            raise error
        self._post.rows(actor).extend(results)
