"""What the server does for the learner: a step's batch, one shard a rank; the version that comes back; checkpoints.

next(s) from a rank ─► ledger.deliver ─► split ─► shard to each rank that asked, the same again when asked again
trained(s, manifest) ─► ledger.train ─► announce        snapshot ─► a thread writes, the server goes on
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from async_rl.buffer import journal
from async_rl.buffer.batch_stats import BatchStats, batch_stats
from async_rl.buffer.fields import take
from async_rl.buffer.files import RunFiles
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.post import Post
from async_rl.buffer.records import Delivery
from async_rl.buffer.roster import Roster, Session
from async_rl.buffer.sharding import split
from async_rl.errors import WeightsError, WireError
from async_rl.weights.manifest import Manifest
from async_rl.wire import Frame, Header, encode_groups


@dataclass(frozen=True, slots=True)
class Dealt:
    """A delivered step, kept until it is trained."""

    delivery: Delivery
    stats: BatchStats
    messages: Sequence[list[Frame]]
    """The ``shard`` message per rank."""


class LearnerDesk:
    """Handlers of the learner ranks' messages.

    Args:
        ledger: the books.
        roster: the clients.
        post: where messages go.
        files: run folder.
        minibatches: per step.
        shard_stats: what rank 0's shard carries beside the batch's own statistics.
        wake: called from the writer thread when a snapshot is done.
    """

    def __init__(
        self,
        ledger: Ledger,
        roster: Roster,
        post: Post,
        files: RunFiles,
        minibatches: int,
        shard_stats: Callable[[], dict[str, Any]],
        wake: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._roster = roster
        self._post = post
        self._files = files
        self._minibatches = minibatches
        self._shard_stats = shard_stats
        self._wake = wake
        self._dealt: dict[int, Dealt] = {}
        self._answered: int | None = None
        """Newest step that was called trained."""
        self._writer = ThreadPoolExecutor(1, "snapshot")
        self._writing: list[tuple[bytes, Future[None]]] = []
        self.last: BatchStats | None = None
        """Statistics of the newest trained batch."""

    @property
    def step_waits(self) -> bool:
        """A rank waits for a step that cannot be delivered yet."""
        return any(s.wants >= 0 for s in self._roster.of("learner"))

    def next(self, rank: Session, header: Header) -> None:
        """A rank asks for a step: the next one, or again one that is not trained yet.

        Raises:
            WireError: ``bad_step``.
        """
        step = take(header, "step", int)
        if step not in self._dealt and step != self._ledger.next_step:
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
        if new_steps and any(s.wants not in self._dealt for s in waiting):
            fresh = self._ledger.deliver()
            if fresh is not None:
                self._deal(fresh, waiting[0].world)
        for rank in waiting:
            if rank.wants in self._dealt:
                self._post.send_frames(rank, self._dealt[rank.wants].messages[rank.rank])
                rank.wants = -1
        return fresh

    def release(self, reason: str) -> None:
        """A stop: it is the answer to ``next`` of a step that no rank has, so that all ranks end after the same one."""
        for rank in self._roster.of("learner"):
            if rank.wants >= 0 and rank.wants not in self._dealt:
                rank.wants = -1
                self._post.send(rank, "stop", reason=reason, error=False)

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
        if step == self._answered:
            self._post.send(rank, "trained", step=step, books=self._ledger.books())
            return None
        if step != -1 and (step != self._ledger.version or step not in self._dealt):
            raise WireError("bad_step", f"trained step {step}, the next is {self._ledger.version}")
        try:
            manifest = Manifest.from_wire(take(header, "manifest", dict))
        except WeightsError as error:
            raise WireError("bad_manifest", str(error)) from None
        expected = self._ledger.version if step == -1 else step + 1
        if manifest.version != expected:
            raise WireError("bad_manifest", f"version {manifest.version} after step {step}, not {expected}")
        if step != -1:
            self._close(step)
        self._answered = step
        self._post.send(rank, "trained", step=step, books=self._ledger.books())
        return manifest

    def snapshot(self, rank: Session, header: Header) -> None:
        """Write the ledger into a folder of the run; :meth:`finish_snapshots` answers when it is on disk."""
        path = take(header, "path", str)
        folder = self._files.inside(path)
        if folder is None:
            detail = f"{path} is not inside the run folder {self._files.out}"
            self._post.send(rank, "snapshot", ok=False, detail=detail)
            return
        future = self._writer.submit(journal.save, journal.freeze(self._ledger), folder)
        future.add_done_callback(lambda _: self._wake())
        self._writing.append((rank.identity, future))

    def finish_snapshots(self) -> None:
        """Answer for the snapshots that are written."""
        for identity, future in [w for w in self._writing if w[1].done()]:
            self._writing.remove((identity, future))
            error = future.exception()
            self._post.send(identity, "snapshot", ok=error is None, detail="" if error is None else str(error))

    def close(self) -> None:
        """Let a snapshot in progress end."""
        self._writer.shutdown(wait=True)

    def _deal(self, delivery: Delivery, world: int) -> None:
        stats = batch_stats(delivery.groups, delivery.step)
        parts = split(delivery.groups, self._minibatches, world)
        beside = {**stats.to_plain(), **self._shard_stats()}
        messages = [
            encode_groups(
                "shard",
                parts.shards[rank].groups,
                step=delivery.step,
                stats=beside if rank == 0 else {},
                **parts.header(rank),
            )
            for rank in range(world)
        ]
        self._dealt[delivery.step] = Dealt(delivery, stats, messages)

    def _close(self, step: int) -> None:
        dealt = self._dealt.pop(step)
        self._ledger.train(step)
        self._ledger.tally.ages.update(dealt.stats.ages)
        self.last = dealt.stats
        row = {
            "step": step,
            "ordinals": [g.ordinal for g in dealt.delivery.groups],
            "attempts": [g.attempt for g in dealt.delivery.groups],
            "task_indices": [g.task_index for g in dealt.delivery.groups],
        }
        self._files.append("batches", row)
