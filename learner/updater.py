"""One optimiser update, from groups to new parameters; knows nothing of sockets.

groups ─► micro-batches ─► forward, backward ─► [ gradient │ scalars ] ─► one all_reduce ─► clip ─► AdamW
          ------------------- gradient() -------------------------------   ------- apply() -------
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from async_rl.config import Config
from async_rl.data import Group, is_correct
from async_rl.errors import AsyncRLError
from async_rl.timer import StateTimer
from learner.algorithms.grpo import RATIO_BINS, SUMS, grpo_loss
from learner.algorithms.schedules import kl_adaptive_lr, warmup
from learner.batching import MicroBatch, build_micro_batches, count_micro_batches
from learner.flat import FlatParameters
from learner.group import LearnerGroup
from learner.logprobs import can_forward_trees, predicted_logprobs
from learner.optimizer import FlatAdamW, clip_flat
from learner.reference import Reference
from learner.scalars import Scalars, Totals

MAX_SKIPPED = 5
"""Updates with a non-finite gradient in a row that end the run."""

_REWARD_SUMS = ("sequences", "scored", "reward", "reward_squared", "correct")


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """What one update of this rank trains on, and the global counts that its losses are divided by."""

    groups: Sequence[Group]
    """This rank's share."""
    num_tokens: int
    """Trained tokens over all ranks."""
    num_sequences: int
    """Sequences over all ranks."""
    lengths_per_rank: Sequence[Sequence[int]]
    """Lengths of the sequences that each rank has."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What happened to one update."""

    grad_norm: float
    """Before clipping."""
    lr: float
    skipped: bool
    """The gradient was not finite, so the parameters stayed as they were."""


class Updater:
    """The model with its flat parameters and optimiser.

    Args:
        config: algorithm and learner settings.
        model: causal language model in float32 on the group's device; its parameters move into the flat vector.
        reference: for the KL term, or None.
        group: the ranks.
        timer: told when this rank trains and when it reduces.
    """

    def __init__(
        self, config: Config, model: Any, reference: Reference | None, group: LearnerGroup, timer: StateTimer
    ) -> None:
        self._config = config
        self._group = group
        self._timer = timer
        self._reference = reference
        self._num_ages = config.buffer.max_staleness + 2
        sizes = dict.fromkeys((*SUMS, *_REWARD_SUMS), 1)
        sizes |= {"ratio_histogram": RATIO_BINS, "age_histogram": self._num_ages}
        dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        self.model = model
        self.flat = FlatParameters({"policy": model}, group.device, sum(sizes.values()), dtype)
        self.optimizer = FlatAdamW(self.flat, config.learner.betas, config.learner.weight_decay)
        self.lr = config.learner.lr
        """Learning rate before warm-up; the adaptive schedule changes it."""
        self.skipped_in_row = 0
        self._scalars = Scalars(self.flat.tail, sizes)
        self._trees = can_forward_trees(model)

    def gradient(self, batch: MiniBatch, version: int) -> Totals:
        """Fill ``flat.grad`` with the gradient of the global mini-batch at the present parameters.

        Args:
            batch: this rank's share.
            version: weight version that is trained, for the ages.

        Returns:
            Sums over all ranks, the same on each: see :data:`learner.algorithms.grpo.SUMS`.
        """
        self._timer.enter("training")
        budget = self._config.learner.micro_batch_tokens
        micro_batches = build_micro_batches(
            batch.groups,
            version=version,
            budget=budget,
            count=max(count_micro_batches(lengths, budget) for lengths in batch.lengths_per_rank),
            normalize_std=self._config.algorithm.normalize_std,
            device=self._group.device,
            trees=self._trees,
        )
        self.flat.zero_grad()
        self._scalars.add(_reward_sums(batch.groups))
        for micro_batch in micro_batches:
            if len(micro_batch.reads_M):
                self._backward(micro_batch, batch)
        self.flat.check_views()
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
        norm = clip_flat(self.flat.grad, self._config.learner.max_grad_norm)
        if not (math.isfinite(norm) and math.isfinite(float(totals["loss_policy"] + totals["loss_kl"]))):
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
        lr = self.lr * warmup(step, self._config.learner.warmup_steps)
        self.optimizer.step(lr)
        return Applied(norm, lr, skipped=False)

    def _backward(self, micro_batch: MicroBatch, batch: MiniBatch) -> None:
        logprobs_N, entropy_N = predicted_logprobs(
            self.model,
            micro_batch.inputs_RL,
            micro_batch.source_N,
            micro_batch.targets_N,
            self._config.sampling.temperature,
            micro_batch.positions_RL,
            micro_batch.visible_RLL,
        )
        reads_M = micro_batch.reads_M
        loss, sums = grpo_loss(
            micro_batch,
            logprobs_N[reads_M],
            entropy_N[reads_M],
            self._reference.logprobs(micro_batch) if self._reference else None,
            self._config.algorithm,
            batch.num_tokens,
            batch.num_sequences,
            self._num_ages,
        )
        loss.backward()
        self._scalars.add(sums)


def _reward_sums(groups: Sequence[Group]) -> dict[str, float]:
    rewards_S = np.concatenate([np.zeros(0), *(g.rewards for g in groups)])
    scored = rewards_S[np.isfinite(rewards_S)]
    return {
        "sequences": len(rewards_S),
        "scored": len(scored),
        "reward": float(scored.sum()),
        "reward_squared": float(np.square(scored).sum()),
        "correct": int(is_correct(scored).sum()),
    }
