"""One optimiser update, from prepared groups to new parameters; knows nothing of sockets.

groups ─► learner.prepare ─► micro-batches ─► forward, backward ─► [ gradient │ scalars ] ─► one all_reduce ─► AdamW
          - prepare() -----   -------------------- gradient() ----------------------------------------------  -apply()-
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from async_rl.config import Config
from async_rl.data import is_correct
from async_rl.errors import AsyncRLError
from async_rl.timer import StateTimer
from learner.adapter import FrozenBase
from learner.algorithms.kl import adapt_kl_coef
from learner.algorithms.objective import Counts, Outputs, objective, sum_sizes
from learner.algorithms.schedules import kl_adaptive_lr, warmup
from learner.algorithms.whitening import moments
from learner.batching import MicroBatch, make_filler
from learner.flat import FlatParameters
from learner.group import LearnerGroup
from learner.networks import Networks
from learner.optimizer import FlatAdamW
from learner.prepare import PreparedBatch, Preparer
from learner.reference import ReferenceModel
from learner.scalars import Scalars, Totals
from learner.shard import MiniBatch

if TYPE_CHECKING:
    from learner.sharded import ShardedAdamW, ShardedParameters

MAX_SKIPPED = 5
"""Updates with a non-finite gradient in a row that end the run."""

MOST_AGES = 1024
"""Older tokens are counted together: a bound that is as good as none must not cost its own size in memory."""

HEAD_SPEED = 10.0
"""A value head begins at 0 and must follow rewards that rise; at the rate of the trunk below it, it lags behind."""

_BATCH_SUMS = ("sequences", "scored", "reward", "reward_squared", "correct", "advantage", "advantage_squared")
_LOSSES = ("loss_policy", "loss_kl", "loss_value")


@dataclass(frozen=True, slots=True)
class Applied:
    """What happened to one update."""

    grad_norm: float
    """Before clipping."""
    lr: float
    skipped: bool
    """The gradient was not finite, so the parameters stayed as they were."""


class Updater:
    """The models with their flat parameters and optimiser.

    Args:
        config: algorithm and learner settings.
        networks: what is trained of it moves into the flat vector, or is left in shards; on the group's device, or (for
            shards) on the CPU.
        group: the ranks.
        timer: told when this rank trains and when it reduces.
    """

    def __init__(self, config: Config, networks: Networks, group: LearnerGroup, timer: StateTimer) -> None:
        self._config = config
        self._group = group
        self._timer = timer
        self._num_ages = min(config.buffer.max_staleness, config.steps, MOST_AGES) + 2
        sizes = dict.fromkeys(_BATCH_SUMS, 1) | sum_sizes(self._num_ages)
        dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        self.networks = networks
        self.flat: FlatParameters | ShardedParameters
        self.optimizer: FlatAdamW | ShardedAdamW
        self.flat, self.optimizer = _make_parameters(config, networks, group, sum(sizes.values()), dtype)
        self.lr = config.learner.lr
        """Learning rate before warm-up; the adaptive schedule changes it."""
        self.kl_coef = config.algorithm.kl_coef
        """β; the adaptive controller changes it."""
        self.skipped_in_row = 0
        self._scalars = Scalars(self.flat.tail, sizes)
        self._preparer = Preparer(config, networks, group, self.flat)

    @property
    def config(self) -> Config:
        """Algorithm and learner settings."""
        return self._config

    @property
    def group(self) -> LearnerGroup:
        """The ranks."""
        return self._group

    @property
    def whole(self) -> FlatParameters:
        """The flat vectors.

        Raises:
            RuntimeError: there are shards instead.
        """
        if not isinstance(self.flat, FlatParameters):
            raise RuntimeError("no rank has the whole vector with learner.strategy = 'fsdp'")
        return self.flat

    def prepare(self, mini_batches: Sequence[MiniBatch], version: int) -> list[PreparedBatch]:
        """Make this rank's part of a step ready, at the parameters of its start; see :class:`Preparer`."""
        self._timer.enter("training")
        return self._preparer.prepare(mini_batches, version, self.kl_coef)

    def gradient(self, batch: PreparedBatch) -> Totals:
        """Fill ``flat.grad`` with the gradient of the global mini-batch at the present parameters.

        Args:
            batch: this rank's share.

        Returns:
            Sums over all ranks, the same on each: those of :func:`learner.algorithms.objective.sum_sizes`, and of the
            rewards (as they came) and advantages of the mini-batch.
        """
        self._timer.enter("training")
        self.flat.zero_grad()
        self._scalars.add(_batch_sums(batch))
        for micro_batch in batch.micro_batches(self._group.device):
            if len(micro_batch.reads_M) or self.flat.in_step:
                self._backward(micro_batch, batch)
        self.flat.finish_gradient()
        self._timer.enter("reducing")
        self._group.all_reduce_flat(self.flat)
        totals = self._scalars.read()
        self._timer.enter("training")
        return totals

    def apply(self, totals: Totals, step: int, adapt: bool) -> Applied:
        """Clip the reduced gradient and step; a non-finite one is skipped on every rank alike.

        Args:
            totals: of :meth:`gradient`.
            step: learner step, for the warm-up.
            adapt: let the adaptive schedule use this update's KL. It means nothing when the tokens were sampled by
                exactly the parameters that are trained.

        Raises:
            AsyncRLError: too many updates in a row were skipped.
        """
        norm = self.optimizer.clip(self._config.learner.max_grad_norm)
        if not (math.isfinite(norm) and all(math.isfinite(float(totals[name])) for name in _LOSSES)):
            self.skipped_in_row += 1
            if self.skipped_in_row >= MAX_SKIPPED:
                raise AsyncRLError(
                    f"step {step}: the gradient was not finite in {MAX_SKIPPED} updates in a row (norm {norm}); lower "
                    "learner.lr, or look at the log-probabilities and rewards in metrics.jsonl"
                )
            return Applied(norm, self.lr, skipped=True)
        self.skipped_in_row = 0
        if adapt and self._config.learner.lr_schedule == "kl_adaptive":
            kl = float(totals["kl_k3"] / totals["tokens"].clamp_min(1))
            self.lr = kl_adaptive_lr(self.lr, kl, self._config.learner.kl_target)
        factor = warmup(step, self._config.learner.warmup_steps)
        rates = {"policy": self.lr * factor, "critic": self._critic_lr * factor}
        self.optimizer.step(rates)
        return Applied(norm, rates["policy"], skipped=False)

    def adapt_kl(self, measured: float | None) -> None:
        """Let the adaptive controller move β, once a step; every rank has the same measurement."""
        if measured is not None and self._config.algorithm.kl_controller == "adaptive":
            self.kl_coef = adapt_kl_coef(self.kl_coef, measured, self._config.algorithm.kl_target)

    def offload(self) -> None:
        """Give the device's memory back until :meth:`restore`: parameters, gradients, moments, reference and base.

        On the CPU the memory is the host's already, so there is nothing to move.
        """
        if self._group.device.type == "cpu":
            return
        for part in self._parts:
            part.offload()
        torch.cuda.empty_cache()

    def restore(self) -> None:
        """Take the device's memory again, with the same values."""
        if self._group.device.type == "cpu":
            return
        for part in self._parts:
            part.restore()

    @property
    def _critic_lr(self) -> float:
        faster = HEAD_SPEED if self._config.algorithm.critic == "head" else 1.0
        return self._config.learner.critic_lr or faster * self.lr

    @property
    def _parts(self) -> list[FlatParameters | FlatAdamW | ReferenceModel | FrozenBase]:
        kept: tuple[ReferenceModel | FrozenBase | None, ...] = (self.networks.reference, self.networks.base)
        if not isinstance(self.flat, FlatParameters) or not isinstance(self.optimizer, FlatAdamW):
            return []  # shards stay: with colocated actors they are refused
        return [self.flat, self.optimizer, *(part for part in kept if part is not None)]

    def _backward(self, micro_batch: MicroBatch, batch: PreparedBatch) -> None:
        if not len(micro_batch.reads_M):
            filler = make_filler(batch.signals.known, self._group.device)
            self.flat.backward(lambda: (0.0 * _sum_of(self.networks.outputs(filler)), None))
            return
        longest = self._config.max_sampled
        counts = Counts(num_tokens=batch.num_tokens, num_sequences=batch.num_sequences, longest=longest)
        sums = self.flat.backward(
            lambda: objective(
                micro_batch,
                self.networks.outputs(micro_batch),
                self._config.algorithm,
                counts,
                self.kl_coef,
                self._num_ages,
            )
        )
        self._scalars.add(sums)


def _batch_sums(batch: PreparedBatch) -> Mapping[str, float]:
    rewards_S = batch.sequences.rewards_S.astype(np.float64)
    scored = rewards_S[np.isfinite(rewards_S)]
    _, advantage, advantage_squared = moments(batch.signals.advantages_M).tolist()
    return {
        "sequences": len(rewards_S),
        "scored": len(scored),
        "reward": float(scored.sum()),
        "reward_squared": float(np.square(scored).sum()),
        "correct": int(is_correct(scored).sum()),
        "advantage": advantage,
        "advantage_squared": advantage_squared,
    }


def _sum_of(outputs: Outputs) -> torch.Tensor:
    """Of all that can have a gradient, so that a backward pass reaches every parameter."""
    values_M = outputs.values_M
    return outputs.logprobs_M.sum() + (values_M.sum() if values_M is not None else 0.0)


def _make_parameters(
    config: Config, networks: Networks, group: LearnerGroup, num_scalars: int, dtype: torch.dtype
) -> tuple[FlatParameters, FlatAdamW] | tuple[ShardedParameters, ShardedAdamW]:
    """What is trained and its optimiser, as ``learner.strategy`` says."""
    betas, weight_decay = config.learner.betas, config.learner.weight_decay
    if config.sharded:
        from learner.sharded import ShardedAdamW, ShardedParameters  # distributed tensors: slow to import

        shards = ShardedParameters(networks.trained, group, num_scalars, dtype)
        networks.follow_rank_0(group)
        return shards, ShardedAdamW(shards, betas, weight_decay)
    flat = FlatParameters(networks.trained, group.device, num_scalars, dtype)
    return flat, FlatAdamW(flat, betas, weight_decay, group if config.learner.shard_optimizer else None)
