"""The learner's loop, the same on every rank; rank 0 has a :class:`Leader` beside it.

shard of s ─► all ranks have theirs? ─► next(s + 1) ─► Domain.train: updates, each with one all_reduce
   ▲                                       │                              │
   │                                       └─► server ─► inbox            │
   └── checkpoint ◄── metrics ◄── trained(s), version s + 1 ◄── publish ──┘   (rank 0)

The next shard is asked for before a step is trained, so that it is there when the step is over. That changes neither
what is trained (oldest first) nor the bound: what is delivered ahead counts as a step of η. Where it could change it,
nothing is asked for ahead: :func:`asks_ahead`.

Colocated, every rank gives its device's memory back after the copy for publishing, before
the version is announced and wakes the actors; it takes the memory again when it has its next shard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from async_rl.client import Client, Stopped
from async_rl.config import RunConfig
from async_rl.metrics import Metrics
from async_rl.process import cpu_seconds, rss_bytes
from async_rl.timer import StateTimer
from async_rl.wire import Frame, Header
from learner.checkpoint import CheckpointError, TrainerState
from learner.domain import Domain
from learner.group import LearnerGroup
from learner.leader import Leader
from learner.together import help_saving, stop_helping


class Trainer:
    """Trains from step ``state.step`` on.

    Args:
        config: the run.
        group: the ranks.
        client: this rank's connection to the server.
        domain: what is trained.
        leader: on rank 0.
        timer: this process's states.
        state: where to continue.
        terminated: whether this process was asked to end (SIGTERM).
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        group: LearnerGroup,
        client: Client,
        domain: Domain,
        leader: Leader | None,
        timer: StateTimer,
        state: TrainerState,
        terminated: Callable[[], bool],
    ) -> None:
        self._config = config
        self._group = group
        self._client = client
        self._domain = domain
        self._leader = leader
        self._timer = timer
        self._step = state.step
        self._trained = state.trained
        self._terminated = terminated
        self._unit = "env_steps" if config.is_control else "tokens"
        self._row_at = time.monotonic()
        self._asked = -1
        """Step whose shard was asked for last."""

    @property
    def state(self) -> TrainerState:
        """What a checkpoint needs now."""
        return TrainerState(
            step=self._step,
            trained=self._trained,
            contract=self._config.contract_hash(),
            numbers=self._domain.numbers(),
        )

    def run(self) -> bool:
        """Publish the start version, train to the last step or until the run is stopped; True when all steps are done.

        Raises:
            AsyncRLError: actor and learner disagree about the same weights, ranks differ, or no update is finite.
            Stopped: the run failed elsewhere.
        """
        self._publish(-1)
        self._row_at = time.monotonic()
        while self._step < self._config.steps:
            self._group.step = self._step
            began = time.monotonic()
            shard = self._next_shard()
            waited_s = time.monotonic() - began
            # The server stops all ranks at the same step, but only rank 0 hears that one which all have is not to
            # begin; a rank with a SIGTERM of its own must not leave the others in the all_reduce.
            stops = self._terminated() or (self._leader is not None and self._leader.stopping)
            begins = shard is not None and not stops
            if not self._group.all_agree(begins) or shard is None:
                return False
            if asks_ahead(self._config) and self._step + 1 < self._config.steps:
                self._ask(self._step + 1)
            self._train(*shard, began, waited_s)
        return True

    def _next_shard(self) -> tuple[Header, Sequence[Frame]] | None:
        self._timer.enter("waiting_data")
        if self._asked < self._step:
            self._ask(self._step)
        try:
            return self._client.answer("next", "shard", give_up=self._terminated, step=self._step)
        except Stopped as stop:
            if stop.error:
                raise
            return None

    def _ask(self, step: int) -> None:
        self._client.send("next", step=step)
        self._asked = step

    def _train(self, header: Header, frames: Sequence[Frame], began: float, waited_s: float) -> None:
        step = self._step
        self._timer.enter("training")
        self._domain.restore()
        trained = self._domain.train(header, frames, step)
        if (step + 1) % self._config.learner.checksum_every == 0:
            self._group.check_equal(self._domain.flat)
        self._step += 1
        self._trained += trained.amount
        learned_s = time.monotonic() - began - waited_s
        self._timer.enter("publishing")  # logging included: colocated, others have the device by then
        books = self._publish(step)
        if self._leader:
            metrics = trained.metrics | books | server_metrics(header["stats"])
            metrics |= self._leader.eval_metrics(header["stats"]["evals"])
            metrics |= {"time/wait_s": waited_s, "time/learn_s": learned_s}
            self._leader.log(step, metrics | self._progress(began, trained.amount))
        every = self._config.checkpoint.every
        if every and self._step % every == 0 and self._step < self._config.steps:
            self.checkpoint(final=False)

    def checkpoint(self, *, final: bool) -> None:
        """Write a checkpoint, once per step; every rank calls it, see :meth:`Leader.checkpoint`.

        Raises:
            CheckpointError: on rank 0, a ``final`` one could not be written.
        """
        if self._leader is None:
            if self._config.saves_together:
                with self._timer.during("checkpointing"):
                    help_saving(self._group, self._domain.save)
            return
        try:
            self._leader.checkpoint(self.state, final=final)
        except (CheckpointError, Stopped):  # any other error may have come in the middle of a collective
            self._end_saving()
            raise
        self._end_saving()

    def _end_saving(self) -> None:
        """On rank 0: the ranks that help with a checkpoint go on."""
        if self._config.saves_together:
            stop_helping(self._group)

    def _publish(self, step: int) -> Metrics:
        """Publish the version that ``step`` made (-1: the start version); colocated, the device is free by then."""
        if self._leader:
            self._leader.stage(self._step)
        else:
            self._domain.flat.assist()
        if self._config.actors.colocated:
            self._domain.offload()
            self._group.all_agree(True)  # every rank has given its device back
        metrics = self._leader.announce(step) if self._leader else {}
        return metrics | self._broadcast()

    def _broadcast(self) -> Metrics:
        """Send the version to the engines that wait for it; of shards all ranks gather what is sent."""
        leader = self._leader
        is_awaited = leader is not None and leader.has_receivers
        if self._config.weights.path == "broadcast" and self._config.sharded:
            is_awaited = bool(self._group.broadcast_number(float(is_awaited)))
        if not is_awaited:
            return {}
        if leader is not None:
            return leader.broadcast()
        self._domain.flat.assist()
        return {}

    def _progress(self, began: float, amount: float) -> Metrics:
        now, before = time.monotonic(), self._row_at
        self._row_at = now
        progress: Metrics = {
            "version": float(self._step),
            f"{self._unit}/trained": self._trained,
            f"{self._unit}/step": amount,
            "time/step_s": now - began,
            "cpu_s": cpu_seconds(),
            "rss": float(rss_bytes()),
        }
        return progress | ({"fps/total": amount / (now - before)} if self._config.is_control else {})


def asks_ahead(config: RunConfig) -> bool:
    """Whether a step's shard is asked for during the step before.

    Not with η = 0, where it does not exist yet; not colocated, where actors have the device in between; not with
    replay, where what the present step returns may belong to the next.
    """
    return config.buffer.max_staleness > 0 and not config.actors.colocated and config.buffer.max_uses == 1


def server_metrics(stats: Mapping[str, Any]) -> Metrics:
    """What the server tells with a shard.

    Utilisation of both sides; mean length of what met which fate; numbers of a control run under their own names, None
    where there is nothing to measure yet.
    """
    named = {f"util/{role}": share for role, share in stats["utilization"].items()}
    named |= {f"length/{fate}": length for fate, length in stats["lengths"].items()}
    metrics: Metrics = {name: float(value) for name, value in named.items() if value is not None}
    return metrics | stats.get("control", {})
