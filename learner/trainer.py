"""The learner's loop, the same on every rank; rank 0 has a :class:`Leader` beside it.

next(s) ─► shard ─► all ranks have theirs? ─► epochs × mini-batches: gradient, one all_reduce, AdamW
   ▲                                                                          │
   └──── checkpoint ◄── metrics ◄── trained(s), version s + 1 ◄── publish ◄───┘   (rank 0)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from async_rl.client import Client, Stopped
from async_rl.config import Config
from async_rl.errors import AsyncRLError
from async_rl.process import cpu_seconds, rss_bytes
from async_rl.timer import StateTimer
from learner.checkpoint import TrainerState
from learner.group import LearnerGroup
from learner.leader import Leader
from learner.scalars import Totals
from learner.shard import Shard
from learner.step_stats import NOISE_FLOOR, StepStats, difference_age0
from learner.updater import Updater

MISMATCH_LIMITS = {"float32": 1e-2, "bfloat16": 0.5}
"""Mean |log-probability difference| between actor and learner, same weights, above which the run does not start."""


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
        self._start = state.step
        self._step = state.step
        self._trained_tokens = state.trained_tokens
        self._terminated = terminated
        self._warned = False

    @property
    def state(self) -> TrainerState:
        """What a checkpoint needs now."""
        return TrainerState(
            step=self._step,
            lr=self._updater.lr,
            trained_tokens=self._trained_tokens,
            skipped_in_row=self._updater.skipped_in_row,
            contract=self._config.contract_hash(),
        )

    def run(self) -> bool:
        """Train to the last step or until the run is stopped; True when all steps are done.

        Raises:
            AsyncRLError: actor and learner disagree about the same weights, ranks differ, or no update is finite.
            Stopped: the run failed elsewhere.
        """
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
        stats = self._update(shard)
        if (step + 1) % self._config.learner.checksum_every == 0:
            self._group.check_equal(self._updater.flat)
        self._step += 1
        metrics = stats.metrics(self._config.algorithm.epochs)
        self._trained_tokens += metrics["tokens/step"]
        if self._leader:
            self._report(self._leader, shard, step, metrics, began, waited_s)
            every = self._config.checkpoint.every
            if every and self._step % every == 0 and self._step < self._config.steps:
                self._leader.checkpoint(self.state, final=False)

    def _update(self, shard: Shard) -> StepStats:
        stats, updater, step = StepStats(), self._updater, self._step
        for epoch in range(self._config.algorithm.epochs):
            for index, batch in enumerate(shard.mini_batches):
                on_version = epoch == 0 and index == 0
                totals = updater.gradient(batch, version=step)
                if on_version:
                    self._check_mismatch(totals)
                on_policy = on_version and bool(totals["tokens_age0"] == totals["tokens"])
                stats.add(totals, updater.apply(totals, step, adapt=not on_policy))
        return stats

    def _check_mismatch(self, totals: Totals) -> None:
        """Tokens that exactly these weights sampled must have the same log-probability here, up to rounding."""
        if self._config.actors.engine == "mock":  # its log-probabilities are made up
            return
        difference, dtype = difference_age0(totals), self._config.model.dtype
        limit = MISMATCH_LIMITS[dtype]
        if self._step == self._start and not difference <= limit:
            raise AsyncRLError(
                f"actor and learner disagree about the same weights (version {self._step}): mean |log-probability "
                f"difference| {difference:.3g} over {int(totals['tokens_age0'])} tokens, limit {limit} for {dtype}; "
                "check that both run this model, dtype, temperature and tokenizer (`async-rl doctor CONFIG`)"
            )
        if self._leader and dtype == "float32" and difference > NOISE_FLOOR and not self._warned:
            self._warned = True
            print(
                f"async-rl: warning: step {self._step}: log-probabilities of the current version differ by "
                f"{difference:.3g} on average between actor and learner; with actors.kv_cache = 'keep' a part of that "
                "is old KV, the rest is a fault",
                file=sys.stderr,
                flush=True,
            )

    def _report(
        self, leader: Leader, shard: Shard, step: int, metrics: dict[str, float], began: float, waited_s: float
    ) -> None:
        metrics |= leader.publish(step) | server_metrics(shard.stats) | leader.eval_metrics(shard.stats["evals"])
        metrics |= {
            "version": float(step + 1),
            "tokens/trained": self._trained_tokens,
            "time/step_s": time.monotonic() - began,
            "time/wait_s": waited_s,
            "cpu_s": cpu_seconds(),
            "rss": float(rss_bytes()),
        }
        leader.log(step, metrics)


def server_metrics(stats: Mapping[str, Any]) -> dict[str, float]:
    """What the server tells with a shard: utilisation of both sides, mean length of what met which fate."""
    named = {f"util/{role}": share for role, share in stats["utilization"].items()}
    named |= {f"length/{fate}": length for fate, length in stats["lengths"].items()}
    return {name: float(value) for name, value in named.items() if value is not None}
