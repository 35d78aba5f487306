"""The loss of one micro-batch: the configured advantage, ratio, correction and penalties put together.

    behaviour μ, proximal, current π ──► ratio to base, weights w ─► policy loss ─┐
    entropy, values, reference ────────► bonus, value loss, KL ───────────────────┴─► aggregate (global counts) ─► loss

    loss = agg(w · policy) - entropy_coef · agg(entropy) + value_coef · agg(value) + kl_coef · agg(KL)

With ``proximal = "behaviour"`` the ratio is π / μ and w = 1. Otherwise (decoupled PPO, Hilton et al. 2021,
arXiv:2110.00641) it is π / proximal and w = proximal / μ, corrected. Weights by age multiply in always. Masked
tokens (w = 0) have no policy gradient; the counts that are divided by stay those of all sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from async_rl.config import AlgorithmConfig
from learner.algorithms.aggregate import aggregate
from learner.algorithms.cispo import cispo_loss
from learner.algorithms.correction import age_weights, correction_weights
from learner.algorithms.gspo import gspo_loss
from learner.algorithms.importance import importance_loss
from learner.algorithms.kl import kl_estimate
from learner.algorithms.off_policy import off_policy_sizes, off_policy_sums
from learner.algorithms.ppo import ppo_loss
from learner.algorithms.proximal import interpolated_logprobs
from learner.algorithms.value import value_loss
from learner.batching import MicroBatch

_SUMS = (
    "loss_policy",
    "loss_kl",
    "loss_value",
    "clipped",
    "entropy",
    "kl_ref",
    "value_tokens",
    "value_clipped",
    "value_error",
    "returns",
    "returns_squared",
)


def sum_sizes(num_ages: int) -> dict[str, int]:
    """Elements of each sum that :func:`objective` reports, by name; all add up over micro-batches and ranks."""
    return dict.fromkeys(_SUMS, 1) | off_policy_sizes(num_ages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What the models say about the trained tokens of one micro-batch."""

    logprobs_M: torch.Tensor
    """float32 ``[M]`` of the policy, with gradient."""
    entropy_M: torch.Tensor
    """float32 ``[M]`` of the policy; with gradient where ``entropy_coef > 0``."""
    values_M: torch.Tensor | None = None
    """float32 ``[M]`` of the critic, with gradient; None without one."""
    ref_logprobs_M: torch.Tensor | None = None
    """float32 ``[M]`` of the reference, or of the teacher; None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What sums are divided by: of the mini-batch over all ranks."""

    num_tokens: int
    """Trained tokens."""
    num_sequences: int
    """Sequences."""
    longest: int
    """Most tokens that one sequence can have."""


def objective(
    batch: MicroBatch,
    outputs: Outputs,
    algorithm: AlgorithmConfig,
    counts: Counts,
    kl_coef: float,
    num_ages: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One micro-batch's part of the loss of the global mini-batch, and what is reported about it.

    Args:
        batch: what is known about the tokens.
        outputs: what the models say now.
        algorithm: the choices.
        counts: global counts.
        kl_coef: β now (the adaptive controller moves it).
        num_ages: bins per age; older tokens fall into the last one.

    Returns:
        The loss ``[]``, and detached sums of the sizes of :func:`sum_sizes`.

    Raises:
        ValueError: the batch or the outputs lack what the algorithm needs.
    """
    weights_M, base_M = _weights(batch, outputs.logprobs_M.detach(), algorithm)
    policy_M, clipped_M = _policy_loss(batch, outputs.logprobs_M, base_M, weights_M != 0, algorithm)

    def mean(values_M: torch.Tensor) -> torch.Tensor:
        return aggregate(
            values_M,
            batch.sequence_lengths_M,
            algorithm.aggregation,
            counts.num_tokens,
            counts.num_sequences,
            counts.longest,
        )

    policy_loss = mean(weights_M * policy_M)
    loss = policy_loss
    if algorithm.entropy_coef > 0:
        loss = loss - algorithm.entropy_coef * mean(outputs.entropy_M)
    sums = {
        "loss_policy": policy_loss,
        "clipped": (clipped_M & (weights_M != 0)).sum(),
        "entropy": outputs.entropy_M.sum(),
    }
    sums |= off_policy_sums(
        outputs.logprobs_M.detach(),
        batch.behaviour_logprobs_M,
        weights_M,
        batch.ages_M,
        batch.sequence_M,
        batch.num_sequences,
        num_ages,
    )
    if outputs.ref_logprobs_M is not None:
        sums["kl_ref"] = kl_estimate("k3", outputs.logprobs_M, outputs.ref_logprobs_M).sum()
    if kl_coef > 0 and algorithm.kl_in == "loss":
        reference_M = _needed(outputs.ref_logprobs_M, "ref_logprobs_M", "algorithm.kl_in = 'loss'")
        kl_loss = kl_coef * mean(kl_estimate(algorithm.kl_estimator, outputs.logprobs_M, reference_M))
        loss = loss + kl_loss
        sums["loss_kl"] = kl_loss
    if algorithm.advantage == "gae":
        per_token_M, value_sums = _value_loss(batch, outputs, algorithm)
        critic_loss = algorithm.value_coef * mean(per_token_M)
        loss = loss + critic_loss
        sums |= value_sums | {"loss_value": critic_loss}
    return loss, {name: value.detach() for name, value in sums.items()}


def _weights(
    batch: MicroBatch, logprobs_M: torch.Tensor, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight of each token's policy loss, and log-probabilities of the policy that its ratio is taken to."""
    behaviour_M = batch.behaviour_logprobs_M
    by_age_M = age_weights(batch.ages_M, algorithm.age_decay, algorithm.max_token_age)
    if algorithm.proximal == "behaviour":
        return by_age_M, behaviour_M
    if algorithm.proximal == "interpolated":
        base_M = interpolated_logprobs(behaviour_M, logprobs_M, batch.ages_M)
    else:
        base_M = _needed(batch.proximal_logprobs_M, "proximal_logprobs_M", "algorithm.proximal = 'recomputed'")
    weights_M = correction_weights(
        base_M - behaviour_M,
        batch.sequence_M,
        batch.num_sequences,
        algorithm.correction,
        algorithm.correction_low,
        algorithm.correction_high,
    )
    return weights_M * by_age_M, base_M


def _policy_loss(
    batch: MicroBatch,
    logprobs_M: torch.Tensor,
    base_M: torch.Tensor,
    kept_M: torch.Tensor,
    algorithm: AlgorithmConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The configured loss ``[M]``, and where it clipped; masked tokens get harmless inputs, so 0 times them is 0."""
    logprobs_M, base_M = torch.where(kept_M, logprobs_M, 0.0), torch.where(kept_M, base_M, 0.0)
    low, high = algorithm.clip_low, algorithm.clip_high
    if algorithm.loss == "ppo":
        return ppo_loss(logprobs_M, base_M, batch.advantages_M, low, high, algorithm.dual_clip)
    if algorithm.loss == "gspo":
        sequences = batch.sequence_M, batch.num_sequences
        return gspo_loss(logprobs_M, base_M, batch.advantages_M, *sequences, low, high, kept_M)
    if algorithm.loss == "cispo":
        return cispo_loss(logprobs_M, base_M, batch.advantages_M, low, high)
    return importance_loss(logprobs_M, base_M, batch.advantages_M)


def _value_loss(
    batch: MicroBatch, outputs: Outputs, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    needs = "algorithm.advantage = 'gae'"
    values_M = _needed(outputs.values_M, "values_M", needs)
    returns_M = _needed(batch.returns_M, "returns_M", needs)
    old_values_M = _needed(batch.old_values_M, "old_values_M", needs)
    loss_M, clipped_M = value_loss(values_M, old_values_M, returns_M, algorithm.value_clip)
    scored_M = torch.isfinite(returns_M)
    targets_M = torch.where(scored_M, returns_M, 0.0)
    error_M = torch.where(scored_M, values_M.detach() - returns_M, 0.0)
    return loss_M, {
        "value_tokens": scored_M.sum(),
        "value_clipped": clipped_M.sum(),
        "value_error": error_M.square().sum(),
        "returns": targets_M.sum(),
        "returns_squared": targets_M.square().sum(),
    }


def _needed(values_M: torch.Tensor | None, name: str, why: str) -> torch.Tensor:
    if values_M is None:
        raise ValueError(f"{name} is missing, and {why} reads it")
    return values_M
