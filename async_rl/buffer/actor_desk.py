"""What the server does for actors: tickets out by credit, groups in, lost tickets cancelled.

credit ─► remembered ─► room in the ledger? ─► tickets      submit, fail ─► ledger ─► ack      lost ─► cancel
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from async_rl.buffer.fields import number, take
from async_rl.buffer.files import RunFiles
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.post import Post
from async_rl.buffer.records import Answer, Lost
from async_rl.buffer.roster import Roster, Session
from async_rl.buffer.versions import Versions
from async_rl.data import Group
from async_rl.errors import WireError
from async_rl.protocol import Ticket
from async_rl.wire import Frame, Header, decode_groups


class ActorDesk:
    """Handlers of the actors' messages."""

    def __init__(
        self,
        ledger: Ledger,
        roster: Roster,
        post: Post,
        versions: Versions,
        files: RunFiles,
        refused: Counter[str],
    ) -> None:
        self._ledger = ledger
        self._roster = roster
        self._post = post
        self._versions = versions
        self._files = files
        self._refused = refused

    def credit(self, actor: Session, header: Header) -> None:
        """It can take ``count`` tickets, of which some may be on their way: those that it had not ``received`` yet."""
        count, received = take(header, "count", int), take(header, "received", int, actor.tickets)
        under_way = max(0, actor.tickets - max(0, received))
        actor.credit = max(0, min(count, 1 << 20) - under_way)

    def submit(self, actor: Session, header: Header, frames: Sequence[Frame], now: float) -> None:
        """Finished groups. What cannot be decoded is refused and issued again, so that it holds no capacity."""
        try:
            groups = decode_groups(header, frames)
        except WireError as error:
            self._refuse(actor, header, error)
            return
        results = []
        for group in groups:
            answer = self._ledger.submit(actor.name, group, now)
            results.append(self._result(group.ordinal, group.attempt, answer))
            if answer.fresh and answer.outcome == "accepted":
                self._sample(group)
        self._post.send(actor, "ack", results=results)

    def fail(self, actor: Session, header: Header) -> None:
        """An attempt that the actor gave up."""
        ordinal, attempt = take(header, "ordinal", int), take(header, "attempt", int)
        reason, final = take(header, "reason", str)[:80], take(header, "final", bool)
        answer = self._ledger.fail(actor.name, ordinal, attempt, reason, final=final)
        detail = str(header.get("detail", ""))[:500]
        print(f"{actor.name} failed ordinal {ordinal} attempt {attempt}: {reason} {detail}", flush=True)
        self._post.send(actor, "ack", results=[self._result(ordinal, attempt, answer)])

    def live(self, client: Session, header: Header) -> None:
        """A version is live there once its checksum equals what was published; otherwise the client gets no work."""
        version, checksum = take(header, "version", int), take(header, "checksum", str)
        self._versions.time_commit(number(header, "transfer_s"), number(header, "commit_s"))
        if self._versions.proves(version, checksum):
            client.live = version
            return
        client.live = -1
        print(
            f"{client.name} does not hold version {version}: its checksum {checksum[:40]!r} was not published",
            flush=True,
        )

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
        described = header.get("groups")
        for entry in described if isinstance(described, list) else []:
            if not isinstance(entry, dict):
                continue
            ordinal, attempt = entry.get("ordinal"), entry.get("attempt")
            if type(ordinal) is int and type(attempt) is int:
                answer = self._ledger.fail(actor.name, ordinal, attempt, error.reason, final=False)
                answer = Answer("refused", error.reason) if answer.outcome == "failed" else answer
                results.append([ordinal, attempt, answer.outcome, answer.reason])
        if not results:
            raise error
        self._post.send(actor, "ack", results=results)

    def _result(self, ordinal: int, attempt: int, answer: Answer) -> list[Any]:
        if answer.outcome in ("refused", "late") and (answer.fresh or answer.outcome == "refused"):
            self._refused[f"late_{answer.reason}" if answer.outcome == "late" else answer.reason] += 1
        return [ordinal, attempt, answer.outcome, answer.reason]

    def _sample(self, group: Group) -> None:
        """Keep the text of a group if the actor sent it along."""
        prompt, completions = group.meta.get("prompt"), group.meta.get("completions")
        if isinstance(prompt, str) and isinstance(completions, list):
            row = {
                "ordinal": group.ordinal,
                "prompt": prompt,
                "completions": [str(c) for c in completions],
                "rewards": group.rewards.tolist(),
                "version": group.oldest_version,
            }
            self._files.append("samples", row)
