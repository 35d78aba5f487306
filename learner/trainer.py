"""The learner's loop, the same on every rank; rank 0 has a :class:`Leader` beside it.

next(s) ─► shard ─► all ranks have theirs? ─► epochs × mini-batches: gradient, one all_reduce, AdamW
   ▲                                                                          │
   └──── checkpoint ◄── metrics ◄── trained(s), version s + 1 ◄── publish ◄───┘   (rank 0)

With ``actors.placement = "colocated"`` every rank gives its device's memory back after the copy for publishing, before
the version is announced and wakes the actors; it takes the memory again when it has its next shard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from async_rl.client import Client, Stopped
from async_rl.config import Config
from async_rl.metrics import Metrics
from async_rl.process import cpu_seconds, rss_bytes
from async_rl.timer import StateTimer
from learner.checkpoint import TrainerState
from learner.group import LearnerGroup
from learner.leader import Leader
from learner.mismatch import MismatchCheck
from learner.shard import Shard
from learner.step import train_step
from learner.updater import Updater


class Trainer:
    """Trains from step ``state.step`` on.

    Args:
        config: the run.
        group: the ranks.
        client: this rank's connection to the server.
        updater: the model.
        leader: on rank 0.
        timer: this process's states.
        state: where to continue.
        terminated: whether this process was asked to end (SIGTERM).
    """

    def __init__(
        self,
        *,
        config: Config,
        group: LearnerGroup,
        client: Client,
        updater: Updater,
        leader: Leader | None,
        timer: StateTimer,
        state: TrainerState,
        terminated: Callable[[], bool],
    ) -> None:
        self._config = config
        self._group = group
        self._client = client
        self._updater = updater
        self._leader = leader
        self._timer = timer
        self._step = state.step
        self._trained_tokens = state.trained_tokens
        self._terminated = terminated
        self._colocated = config.actors.placement == "colocated"
        self._mismatch = MismatchCheck(config, updater.networks, group.device, warns=leader is not None)

    @property
    def state(self) -> TrainerState:
        """What a checkpoint needs now."""
        return TrainerState(
            step=self._step,
            lr=self._updater.lr,
            kl_coef=self._updater.kl_coef,
            trained_tokens=self._trained_tokens,
            skipped_in_row=self._updater.skipped_in_row,
            contract=self._config.contract_hash(),
        )

    def run(self) -> bool:
        """Publish the start version, train to the last step or until the run is stopped; True when all steps are done.

        Raises:
            AsyncRLError: actor and learner disagree about the same weights, ranks differ, or no update is finite.
            Stopped: the run failed elsewhere.
        """
        self._publish(-1)
        while self._step < self._config.steps:
            began = time.monotonic()
            shard = self._next_shard()
            waited_s = time.monotonic() - began
            # The server stops all ranks at the same step; a rank with a SIGTERM of its own must not leave the others in
            # the all_reduce.
            if not self._group.all_agree(shard is not None) or shard is None:
                return False
            self._train(shard, began, waited_s)
        return True

    def _next_shard(self) -> Shard | None:
        self._timer.enter("waiting_data")
        if self._terminated():
            return None
        try:
            header, frames = self._client.request("next", "shard", step=self._step)
        except Stopped as stop:
            if stop.error:
                raise
            return None
        return Shard.from_message(header, frames)

    def _train(self, shard: Shard, began: float, waited_s: float) -> None:
        step = self._step
        self._timer.enter("training")
        self._updater.restore()
        stats = train_step(self._config, self._updater, shard.mini_batches, step, self._mismatch.check)
        if (step + 1) % self._config.learner.checksum_every == 0:
            self._group.check_equal(self._updater.flat)
        self._step += 1
        self._trained_tokens += stats.tokens
        self._timer.enter("publishing")  # logging included: colocated, others have the device by then
        books = self._publish(step)
        if self._leader:
            metrics = stats.metrics() | books | server_metrics(shard.stats)
            metrics |= self._leader.eval_metrics(shard.stats["evals"])
            self._leader.log(step, metrics | self._progress(began, waited_s))
            every = self._config.checkpoint.every
            if every and self._step % every == 0 and self._step < self._config.steps:
                self._leader.checkpoint(self.state, final=False)

    def _publish(self, step: int) -> Metrics:
        """Publish the version that ``step`` made (-1: the start version); colocated, the device is free by then."""
        if self._leader:
            self._leader.stage(self._step)
        if self._colocated:
            self._updater.offload()
            self._group.all_agree(True)  # every rank has given its device back
        return self._leader.announce(step) if self._leader else {}

    def _progress(self, began: float, waited_s: float) -> Metrics:
        return {
            "version": float(self._step),
            "tokens/trained": self._trained_tokens,
            "time/step_s": time.monotonic() - began,
            "time/wait_s": waited_s,
            "cpu_s": cpu_seconds(),
            "rss": float(rss_bytes()),
        }


def server_metrics(stats: Mapping[str, Any]) -> Metrics:
    """What the server tells with a shard: utilisation of both sides, mean length of what met which fate."""
    named = {f"util/{role}": share for role, share in stats["utilization"].items()}
    named |= {f"length/{fate}": length for fate, length in stats["lengths"].items()}
    return {name: float(value) for name, value in named.items() if value is not None}
