"""GRPO (Shao et al. 2024, arXiv:2402.03300): clipped ratio, group advantage, optional KL to a frozen reference.

    loss = aggregate(-min(r A, clip(r) A)  +  β · k3(policy, reference))        r = policy / behaviour policy

The behaviour log-probabilities come with the tokens, so the ratio is right for tokens of any age and any update.
"""

from __future__ import annotations

import torch

from async_rl.config import AlgorithmConfig
from learner.algorithms.losses import aggregate, clipped_ratio_loss, k3_kl
from learner.batching import MicroBatch

RATIO_BINS = 601
_BIN_WIDTH = 0.01
_WIDEST = _BIN_WIDTH * (RATIO_BINS // 2)

SUMS = (
    "tokens",
    "loss_policy",
    "loss_kl",
    "ratio",
    "ratio_squared",
    "clipped",
    "entropy",
    "kl_k1",
    "kl_k3",
    "difference_age0",
    "tokens_age0",
    "difference_older",
)
"""Scalars that :func:`grpo_loss` returns beside the two histograms; all add up over micro-batches and ranks."""


def grpo_loss(
    batch: MicroBatch,
    logprobs_M: torch.Tensor,
    entropy_M: torch.Tensor,
    ref_logprobs_M: torch.Tensor | None,
    algorithm: AlgorithmConfig,
    num_tokens: int,
    num_sequences: int,
    num_ages: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One micro-batch's part of the loss of the global mini-batch, and what is reported about it.

    Args:
        batch: advantages, behaviour log-probabilities, ages, sequence lengths, all ``[M]``.
        logprobs_M: of the policy, with gradient.
        entropy_M: of the policy, without.
        ref_logprobs_M: of the reference; None without a KL term.
        algorithm: clip, β and aggregation.
        num_tokens: trained tokens of the mini-batch over all ranks.
        num_sequences: sequences of the mini-batch over all ranks.
        num_ages: bins of the age histogram; older tokens fall into the last one.

    Returns:
        The loss ``[]``, and detached sums: the scalars of ``SUMS``, ``ratio_histogram [RATIO_BINS]`` and
        ``age_histogram [num_ages]``.
    """
    per_token_M, clipped_M = clipped_ratio_loss(
        logprobs_M, batch.behaviour_logprobs_M, batch.advantages_M, algorithm.clip_low, algorithm.clip_high
    )

    def mean(values_M: torch.Tensor) -> torch.Tensor:
        return aggregate(values_M, batch.sequence_lengths_M, algorithm.aggregation, num_tokens, num_sequences)

    policy_loss = mean(per_token_M)
    kl_loss = torch.zeros_like(policy_loss)
    if ref_logprobs_M is not None:
        kl_loss = mean(k3_kl(logprobs_M, ref_logprobs_M)) * algorithm.kl_coef
    with torch.no_grad():
        sums = _off_policy_sums(batch, logprobs_M.detach(), num_ages)
        sums |= {
            "loss_policy": policy_loss.detach(),
            "loss_kl": kl_loss.detach(),
            "clipped": clipped_M.sum(),
            "entropy": entropy_M.sum(),
        }
    return policy_loss + kl_loss, sums


def _off_policy_sums(batch: MicroBatch, logprobs_M: torch.Tensor, num_ages: int) -> dict[str, torch.Tensor]:
    log_ratio_M = logprobs_M - batch.behaviour_logprobs_M
    ratio_M = log_ratio_M.exp()
    fresh_M = batch.ages_M == 0
    difference_M = log_ratio_M.abs()
    return {
        "tokens": torch.full_like(ratio_M, 1.0).sum(),
        "ratio": ratio_M.sum(),
        "ratio_squared": ratio_M.square().sum(),
        # KL(behaviour || policy) from samples of the behaviour policy: Schulman 2020, "Approximating KL divergence".
        "kl_k1": -log_ratio_M.sum(),
        "kl_k3": (torch.expm1(log_ratio_M) - log_ratio_M).sum(),
        "difference_age0": (difference_M * fresh_M).sum(),
        "tokens_age0": fresh_M.sum(),
        "difference_older": (difference_M * ~fresh_M).sum(),
        "ratio_histogram": ratio_histogram(log_ratio_M),
        "age_histogram": torch.bincount(batch.ages_M.clamp(0, num_ages - 1), minlength=num_ages),
    }


def ratio_histogram(log_ratio_M: torch.Tensor) -> torch.Tensor:
    """Counts ``[RATIO_BINS]`` of log-ratios ``[M]`` in bins that are finest around 0: even in ``sign(x) sqrt(|x|)``."""
    scaled_M = log_ratio_M.sign() * log_ratio_M.abs().sqrt()
    index_M = ((scaled_M.nan_to_num().clamp(-_WIDEST, _WIDEST) + _WIDEST) / _BIN_WIDTH).round().long()
    return torch.bincount(index_M, minlength=RATIO_BINS)


def ratio_percentile(histogram: torch.Tensor, fraction: float) -> float:
    """Ratio below which ``fraction`` of the tokens lie, from :func:`ratio_histogram`; 1 for an empty one."""
    total = float(histogram.sum())
    if total == 0:
        return 1.0
    index = int(torch.searchsorted(histogram.double().cumsum(0), fraction * total))
    scaled = min(index, RATIO_BINS - 1) * _BIN_WIDTH - _WIDEST
    return float(torch.tensor(scaled * abs(scaled)).exp())
