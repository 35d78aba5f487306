"""What the server does for scorers: submitted groups out by credit, annotations in.

credit ─► remembered ─► does a group wait for its stage? ─► lease        annotate, fail ─► ledger ─► ack
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence

from async_rl.buffer.acks import Row, attempts_of, row
from async_rl.buffer.fields import natural, shown, slug, take
from async_rl.buffer.files import RunFiles
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.post import Post
from async_rl.buffer.records import Answer
from async_rl.buffer.roster import Roster, Session
from async_rl.buffer.samples import sample_row
from async_rl.buffer.scoring import MAX_TRIES
from async_rl.data import Annotation, Group
from async_rl.errors import WireError
from async_rl.wire import LIMITS, Frame, Header, decode_annotations, encode_groups

UNSERVED_S = 15.0
"""Groups may wait so long for a scorer to connect before the status says so."""


class ScorerDesk:
    """Handlers of the scorers' messages."""

    def __init__(self, ledger: Ledger, roster: Roster, post: Post, files: RunFiles, refused: Counter[str]) -> None:
        self._ledger = ledger
        self._roster = roster
        self._post = post
        self._files = files
        self._refused = refused
        self._unserved_since: dict[str, float] = {}

    def annotate(self, scorer: Session, header: Header, frames: Sequence[Frame], now: float) -> None:
        """Results of its stage. What cannot be decoded is a failed try, so that another is made."""
        try:
            annotations = decode_annotations(header, frames)
        except WireError as error:
            rows = [self._give_up(scorer, *key, error.reason, now, final=False) for key in attempts_of(header)]
            if not rows:
                raise
            self._refused[error.reason] += 1
            self._post.send(scorer, "ack", results=rows)
            return
        self._post.send(scorer, "ack", results=[self._annotate(scorer, item, now) for item in annotations])

    def fail(self, scorer: Session, header: Header, now: float) -> None:
        """A group that the scorer gave up."""
        ordinal, attempt = natural(header, "ordinal"), natural(header, "attempt")
        final = take(header, "final", bool)
        reason = slug(header, self._ledger.filtered if final else self._ledger.failed)
        result = self._give_up(scorer, ordinal, attempt, reason, now, final=final)
        detail = shown(header.get("detail", ""), 500)
        print(f"{scorer.name} failed ordinal {ordinal} attempt {attempt}: {reason} {detail}", flush=True)
        self._post.send(scorer, "ack", results=[result])

    def leave(self, scorer: Session, why: str) -> int:
        """It is gone; returns how many groups it had. A crash may say ``bye`` too: only a broken line is harmless."""
        num_leased, deadly = self._ledger.lose_scorer(scorer.name, died=why != "reconnected")
        for ordinal, attempt in deadly:
            print(
                f"ordinal {ordinal} attempt {attempt} is filtered (scorers_died): {MAX_TRIES} {scorer.stage} scorers, "
                f"the last {scorer.name}, did not survive it",
                flush=True,
            )
        return num_leased

    def lease(self, now: float) -> None:
        """Give what waits to those that have credit, the one with the fewest groups first."""
        for stage, queue in self._ledger.scoring.queues.items():
            if not queue.waiting:
                continue
            scorers = [s for s in self._of(stage) if s.credit > 0]
            idlest = [(queue.leases[s.name], order, s) for order, s in enumerate(scorers)]
            heapq.heapify(idlest)
            given: dict[str, list[Group]] = defaultdict(list)
            while idlest and queue.waiting:
                leases, order, scorer = heapq.heappop(idlest)
                group = self._ledger.lease(stage, scorer.name, now)
                if group is None:
                    continue
                given[scorer.name].append(group)
                scorer.credit -= 1
                scorer.tickets += 1
                if scorer.credit > 0:
                    heapq.heappush(idlest, (leases + 1, order, scorer))
            for scorer in scorers:
                if scorer.name in given:
                    self._send(scorer, given[scorer.name])

    def notices(self, now: float) -> list[str]:
        """Stages that groups wait for while no scorer of theirs is connected, as sentences; call it regularly."""
        sentences = []
        for stage, queue in self._ledger.scoring.queues.items():
            if not queue.waiting or self._of(stage):
                self._unserved_since.pop(stage, None)
                continue
            since = self._unserved_since.setdefault(stage, now)
            if now - since >= UNSERVED_S:
                sentences.append(
                    f"{queue.waiting} groups wait for the stage {stage!r}, but no scorer of it is connected for "
                    f"{now - since:.0f} s: start one (async-rl actor --role {stage})"
                )
        return sentences

    def _send(self, scorer: Session, groups: list[Group]) -> None:
        """One message, or one a group where so many describe themselves in more than a header may hold."""
        lease_s = self._ledger.rules.lease_s
        frames = encode_groups("lease", groups, lease_s=lease_s)
        if len(frames[0]) <= LIMITS.header_bytes:
            self._post.send_frames(scorer, frames)
            return
        for group in groups:
            self._post.send_frames(scorer, encode_groups("lease", [group], lease_s=lease_s))

    def _of(self, stage: str) -> list[Session]:
        return [s for s in self._roster.of("scorer") if s.stage == stage]

    def _annotate(self, scorer: Session, annotation: Annotation, now: float) -> Row:
        if annotation.stage != scorer.stage:
            answer = Answer("refused", "wrong_stage")
        else:
            answer = self._ledger.annotate(scorer.name, annotation, now)
            scorer.useful |= answer.fresh and answer.outcome in ("accepted", "filtered")
        if answer.fresh and answer.outcome == "accepted" and scorer.stage == "reward":
            group = self._ledger.group(annotation.ordinal)
            sample = sample_row(group) if group is not None else None
            if sample is not None:
                self._files.append("samples", sample)
        return row(annotation.ordinal, annotation.attempt, answer, self._refused)

    def _give_up(self, scorer: Session, ordinal: int, attempt: int, reason: str, now: float, *, final: bool) -> Row:
        answer = self._ledger.fail_stage(scorer.name, scorer.stage, ordinal, attempt, reason, now, final=final)
        return row(ordinal, attempt, answer, self._refused)
