"""What the server does for the learner: a step's batch, one shard a rank; the version that comes back; checkpoints.

next(s) from a rank, ahead ─► ledger.deliver ─► split ─► shard to each rank that asked, the same again when asked again
trained(s, manifest) ─► row of batches.jsonl ─► ledger.train ─► announce
snapshot ─► a thread writes, the server goes on        hello of another group ─► begin_life: what was dealt is forgotten

A step's row is on disk before the ledger calls it trained, so that a restarted server finds a row for each such step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from async_rl.buffer import journal
from async_rl.buffer.batch_stats import BatchStats, batch_stats
from async_rl.buffer.broadcasts import Broadcasts
from async_rl.buffer.fields import take
from async_rl.buffer.files import RunFiles
from async_rl.buffer.journaled import JournaledLedger
from async_rl.buffer.post import Post
from async_rl.buffer.records import Delivery
from async_rl.buffer.roster import Roster, Session
from async_rl.buffer.sharding import split
from async_rl.buffer.undo import batch_row
from async_rl.buffer.versions import Versions
from async_rl.errors import WeightsError, WireError
from async_rl.weights.manifest import Manifest
from async_rl.wire import Frame, Header, encode_groups

_MOST_TROUBLE = 1000
_PAST_LIVES = 64
"""So many former lives of the group are still refused, should one of their ranks wake up."""


@dataclass(frozen=True, slots=True)
class Dealt:
    """A delivered step, kept until it is trained."""

    row: dict[str, Any]
    """Of ``batches.jsonl``."""
    stats: BatchStats
    messages: Sequence[list[Frame]]
    """The ``shard`` message per rank."""


@dataclass(frozen=True, slots=True)
class Writing:
    """A snapshot on its way to the disk."""

    identity: bytes
    """Who asked for it last."""
    path: str
    future: Future[None]


class LearnerDesk:
    """Handlers of the learner ranks' messages.

    Args:
        ledger: the books.
        roster: the clients.
        post: where messages go.
        files: run folder.
        versions: of the weights.
        broadcasts: who takes part in that of a version.
        minibatches: per step.
        shard_stats: what rank 0's shard carries beside the batch's own statistics.
        wake: called from the writer thread when a snapshot is done.
        now: the clock.
    """

    def __init__(
        self,
        ledger: JournaledLedger,
        roster: Roster,
        post: Post,
        files: RunFiles,
        versions: Versions,
        broadcasts: Broadcasts,
        minibatches: int,
        shard_stats: Callable[[], dict[str, Any]],
        wake: Callable[[], None],
        now: float,
    ) -> None:
        self._ledger = ledger
        self._roster = roster
        self._post = post
        self._files = files
        self._versions = versions
        self._broadcasts = broadcasts
        self._minibatches = minibatches
        self._shard_stats = shard_stats
        self._wake = wake
        self._dealt: dict[int, Dealt] = {}
        self._unwritten: list[dict[str, Any]] = []
        """Rows of trained steps that wait for space on the disk."""
        self.group: str | None = None
        """The present life of the learner group; ``None`` before the first."""
        self._stopping = False
        """The run winds down: no step is begun any more."""
        self._past: deque[str] = deque(maxlen=_PAST_LIVES)
        self._disowned: str | None = None
        self.heard = now
        """When it last worked at a step, or was there: not its beats, which come from a thread of their own."""
        self._writer = ThreadPoolExecutor(1, "snapshot")
        self._writing: list[Writing] = []
        self._written = ""
        """Path of the newest snapshot that is on disk."""
        self.trouble = ""
        """Why the learner cannot write a checkpoint; empty while it can."""
        self.last: BatchStats | None = None
        """Statistics of the newest trained batch."""

    # ------------------------------------------------------------------ lives of the group

    def refusal(self, hello: Header) -> tuple[str, str]:
        """Code and sentence for a rank that cannot take part; empty for one that can.

        Raises:
            WireError: a field is missing or of the wrong type.
        """
        group, step = take(hello, "group", str), take(hello, "step", int)
        if group in self._past:
            return "replaced", "another life of the learner group has taken over"
        newest = self._ledger.next_step if group == self.group else self._ledger.version
        if not 0 <= step <= newest or group == self._disowned:
            return "ahead", (
                f"this learner continues with step {step}, the server with step {self._ledger.version}: start the "
                "learner again, from its newest checkpoint"
            )
        return "", ""

    def begin_life(self, group: str, now: float) -> None:
        """Another group takes the place of the one that was."""
        if self.group is not None:
            self._past.append(self.group)
        self.group, self.heard = group, now
        self.trouble = ""
        self._dealt.clear()
        self._unwritten = [row for row in self._unwritten if row["step"] < self._ledger.version]
        self.note()

    def disown(self, group: str) -> None:
        """A life whose newest steps this server has lost: it must begin again."""
        self._disowned = group

    def left(self, now: float) -> None:
        """A rank is gone: the group has its deadline to come back."""
        self.heard = now

    def note(self) -> None:
        """For a restarted server."""
        self._ledger.note("learner", {"group": self.group, "past": list(self._past)})

    def restore(self, note: Mapping[str, Any]) -> None:
        """The group that a restarted server goes on with.

        Raises:
            KeyError, TypeError: it is no note.
        """
        self.group = note["group"]
        self._past.extend(note["past"])

    # ------------------------------------------------------------------ steps

    @property
    def step_waits(self) -> bool:
        """A rank waits for a step that cannot be delivered yet; not one that asks ahead, while it trains."""
        return any(s.wants == self._ledger.version for s in self._roster.of("learner"))

    def next(self, rank: Session, header: Header) -> None:
        """A rank asks for a step: the next one, perhaps while it trains the one before, or again one that is untrained.

        Raises:
            WireError: ``bad_step``.
        """
        step = take(header, "step", int)
        if step not in self._ledger.delivered and step != self._ledger.next_step:
            raise WireError("bad_step", f"{rank.name} asks for step {step}, the next is {self._ledger.next_step}")
        if step >= self._ledger.rules.steps:
            raise WireError("bad_step", f"{rank.name} asks for step {step}, the run has {self._ledger.rules.steps}")
        rank.wants = step

    def deliver(self, *, new_steps: bool) -> Delivery | None:
        """Answer the ranks that wait, if their step can be delivered; returns a step delivered just now.

        Args:
            new_steps: also take steps that no rank has yet.
        """
        waiting = [s for s in self._roster.of("learner") if s.wants >= 0]
        fresh = None
        if new_steps and any(s.wants not in self._ledger.delivered for s in waiting):
            fresh = self._ledger.deliver()
        for rank in waiting:
            if rank.wants in self._ledger.delivered:
                self._post.send_frames(rank, self._deal(rank.wants, rank.world).messages[rank.rank])
                rank.wants = -1
        return fresh

    def release(self, reason: str) -> None:
        """A stop: it is the answer to ``next`` of a step that no rank has, so that all ranks end after the same one.

        One that they have ahead is not begun: ``trained`` is answered with ``stopping``.
        """
        self._stopping = True
        for rank in self._roster.of("learner"):
            if rank.wants >= 0 and rank.wants not in self._ledger.delivered:
                self._post.send(rank, "stop", reason=reason, error=False, step=rank.wants)
                rank.wants = -1

    def trained(self, rank: Session, header: Header) -> Manifest | None:
        """Close the step in the books (-1: no step, the start version).

        Returns:
            What to announce; ``None`` when the message was repeated after a break, which counts nothing.

        Raises:
            WireError: ``bad_step``, ``bad_manifest``, ``not_rank_0``.
        """
        step = take(header, "step", int)
        if rank.rank != 0:
            raise WireError("not_rank_0", f"trained came from rank {rank.rank}")
        version, is_open = self._ledger.version, step in self._ledger.delivered
        is_repeated = 0 <= step == version - 1 and not is_open
        if step != -1 and not is_repeated and not (step == version and is_open):
            raise WireError("bad_step", f"trained step {step}, the next is {version}")
        manifest = self._manifest(header, version if step == -1 else step + 1)
        if step != -1 and not is_repeated:
            self._close(step, rank.world)
        is_new = not self._versions.is_newest(manifest)
        place = self._broadcasts.offer(header, manifest) if is_new else {}
        self._post.send(rank, "trained", step=step, books=self._ledger.books(), stopping=self._stopping, **place)
        return manifest if is_new else None

    def _manifest(self, header: Header, version: int) -> Manifest:
        try:
            manifest = Manifest.from_wire(take(header, "manifest", dict))
        except WeightsError as error:
            raise WireError("bad_manifest", str(error)) from None
        if manifest.order != (self._ledger.epoch, version):
            raise WireError(
                "bad_manifest",
                f"version {manifest.version} of epoch {manifest.epoch}, expected version {version} of epoch "
                f"{self._ledger.epoch}",
            )
        newest = self._versions.newest
        if newest is not None and newest.order == manifest.order and not self._versions.is_newest(manifest):
            raise WireError("bad_manifest", f"version {version} was published before, with other bytes")
        return manifest

    def snapshot(self, rank: Session, header: Header) -> None:
        """Write the ledger into a folder of the run; :meth:`finish_snapshots` answers when it is on disk."""
        path = take(header, "path", str)
        folder = self._files.inside(path)
        if folder is None:
            self._answer(rank.identity, path, f"{path} is not inside the run folder {self._files.out}")
            return
        # Asked again after a break: the learner may be moving the folder away, so nothing is written into it twice.
        if path == self._written and journal.is_in(folder):
            self._answer(rank.identity, path)
            return
        now = [w for w in self._writing if w.path == path]
        self._writing = [w for w in self._writing if w.path != path]
        future = now[0].future if now else self._writer.submit(journal.save, journal.freeze(self._ledger), folder)
        future.add_done_callback(lambda _: self._wake())
        self._writing.append(Writing(rank.identity, path, future))

    def finish_snapshots(self) -> None:
        """Answer for the snapshots that are written."""
        for writing in [w for w in self._writing if w.future.done()]:
            self._writing.remove(writing)
            error = writing.future.exception()
            if error is None:
                self._written = writing.path
                self._ledger.compact()
            self._answer(writing.identity, writing.path, "" if error is None else str(error) or type(error).__name__)

    def take_trouble(self, header: Header, now: float) -> None:
        """Rank 0 says what keeps it from writing a checkpoint; empty: nothing does any more.

        Raises:
            WireError: a field is missing or of the wrong type.
        """
        self.trouble, self.heard = take(header, "reason", str)[:_MOST_TROUBLE], now

    def close(self) -> None:
        """Let a snapshot in progress end."""
        self._writer.shutdown(wait=True)

    def _answer(self, identity: bytes, path: str, fault: str = "") -> None:
        """A snapshot is written, or why it is not."""
        self._post.send(identity, "snapshot", path=path, ok=not fault, detail=fault)

    def _deal(self, step: int, world: int) -> Dealt:
        """The shards of a delivered step; a restarted server splits it again, in the same way."""
        if step not in self._dealt:
            entries = self._ledger.delivered[step]
            groups = [e.payload for e in entries]
            stats = batch_stats(groups, step)
            parts = split(groups, self._minibatches, world)
            beside = {**stats.to_plain(), **self._shard_stats()}
            messages = [
                encode_groups(
                    "shard",
                    parts.shards[rank].groups,
                    with_meta=False,
                    step=step,
                    stats=beside if rank == 0 else {},
                    **parts.header(rank),
                )
                for rank in range(world)
            ]
            self._dealt[step] = Dealt(batch_row(step, entries), stats, messages)
        return self._dealt[step]

    def _close(self, step: int, world: int) -> None:
        dealt = self._deal(step, world)
        self._files.append("batches", dealt.row)
        self._files.flush()
        self._note_unwritten(dealt.row)
        self._ledger.train(step)
        self._dealt.pop(step)
        self.last = dealt.stats

    def _note_unwritten(self, row: dict[str, Any]) -> None:
        """What waits for space would be lost with this process: the journal has it, too."""
        before = self._unwritten
        self._unwritten = [*before, row] if self._files.trouble else []
        if self._unwritten or before:
            self._ledger.note("batches", self._unwritten)
