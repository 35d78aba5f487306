"""How far the policy that is trained is from the one that sampled: sums that are always reported.

log-ratio [M] = log π - log μ  ─►  sums and histograms, which add up over micro-batches and ranks  ─►  percentiles, ESS
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from learner.algorithms.kl import kl_estimate
from learner.algorithms.ratio import bounded_ratio
from learner.algorithms.segments import sequence_sums

RATIO_BINS = 601
_BIN_WIDTH = 0.01
_WIDEST = _BIN_WIDTH * (RATIO_BINS // 2)


def off_policy_sizes(num_ages: int) -> dict[str, int]:
    """Elements of each sum of :func:`off_policy_sums`, by name."""
    return {
        "tokens": 1,
        "ratio": 1,
        "ratio_squared": 1,
        "weight": 1,
        "weight_squared": 1,
        "masked": 1,
        "kl_k1": 1,
        "kl_k3": 1,
        "ratio_histogram": RATIO_BINS,
        "sequence_ratio_histogram": RATIO_BINS,
        "sequence_mean_histogram": RATIO_BINS,
        "age_histogram": num_ages,
        "age_difference": num_ages,
        "fresh": 1,
        "fresh_difference": 1,
    }


def off_policy_sums(
    logprobs_M: torch.Tensor,
    behaviour_logprobs_M: torch.Tensor,
    weights_M: torch.Tensor,
    ages_M: torch.Tensor,
    sequence_M: torch.Tensor,
    num_sequences: int,
    num_ages: int,
) -> dict[str, torch.Tensor]:
    """What one micro-batch adds to the report.

        r = π / μ        ratio = Σ r        kl_k1 = Σ -log r        kl_k3 = Σ (r - 1 - log r), both KL(μ || π)

    Args:
        logprobs_M: of the policy, without gradient, ``[M]``.
        behaviour_logprobs_M: of the policy that sampled, ``[M]``.
        weights_M: what each token's policy loss is multiplied by, ``[M]``; 0 counts as masked.
        ages_M: int64 ``[M]``.
        sequence_M: int64 ``[M]``, sequence of each token; sequences are whole.
        num_sequences: sequences in this micro-batch.
        num_ages: bins per age; older tokens fall into the last one.

    Returns:
        Tensors of the sizes of :func:`off_policy_sizes`. ``age_histogram`` counts tokens per age, ``age_difference``
        sums |log r| per age; ``fresh`` and ``fresh_difference`` do so over sequences whose tokens all have age 0. The
        three ratio histograms (:func:`ratio_histogram`) hold r by token, its product over a sequence, and its geometric
        mean over a sequence.
    """
    log_ratio_M = logprobs_M - behaviour_logprobs_M
    ratio_M = bounded_ratio(log_ratio_M)
    ages_M = ages_M.clamp(0, num_ages - 1)
    lengths_S = sequence_sums(torch.ones_like(log_ratio_M), sequence_M, num_sequences)
    log_ratio_S = sequence_sums(log_ratio_M, sequence_M, num_sequences)[lengths_S > 0]
    fresh_M = sequence_sums(ages_M, sequence_M, num_sequences)[sequence_M] == 0
    return {
        "tokens": lengths_S.sum(),
        "ratio": ratio_M.sum(),
        "ratio_squared": ratio_M.square().sum(),
        "weight": weights_M.sum(),
        "weight_squared": weights_M.square().sum(),
        "masked": (weights_M == 0).sum(),
        # KL(behaviour || policy): the samples are the behaviour's, so it is the estimator's policy and π its reference.
        "kl_k1": kl_estimate("k1", behaviour_logprobs_M, logprobs_M).sum(),
        "kl_k3": kl_estimate("k3", behaviour_logprobs_M, logprobs_M).sum(),
        "ratio_histogram": ratio_histogram(log_ratio_M),
        "sequence_ratio_histogram": ratio_histogram(log_ratio_S),
        "sequence_mean_histogram": ratio_histogram(log_ratio_S / lengths_S[lengths_S > 0]),
        "age_histogram": torch.bincount(ages_M, minlength=num_ages),
        "age_difference": sequence_sums(log_ratio_M.abs(), ages_M, num_ages),
        "fresh": fresh_M.sum(),
        "fresh_difference": (log_ratio_M.abs() * fresh_M).sum(),
    }


def ratio_histogram(log_ratio_M: torch.Tensor) -> torch.Tensor:
    """Counts ``[RATIO_BINS]`` of log-ratios ``[M]`` in bins that are finest around 0: even in ``sign(x) sqrt(|x|)``."""
    scaled_M = log_ratio_M.sign() * log_ratio_M.abs().sqrt()
    index_M = ((scaled_M.nan_to_num().clamp(-_WIDEST, _WIDEST) + _WIDEST) / _BIN_WIDTH).round().long()
    return torch.bincount(index_M, minlength=RATIO_BINS)


def ratio_percentile(histogram: torch.Tensor, fraction: float) -> float:
    """Ratio below which ``fraction`` of the entries lie, from :func:`ratio_histogram`; 1 for an empty one."""
    total = float(histogram.sum())
    if total == 0:
        return 1.0
    index = int(torch.searchsorted(histogram.double().cumsum(0), fraction * total))
    scaled = min(index, RATIO_BINS - 1) * _BIN_WIDTH - _WIDEST
    return float(torch.tensor(scaled * abs(scaled)).exp())


def effective_sample_size(totals: Mapping[str, torch.Tensor], name: str) -> float:
    """Share of the tokens that importance weights leave effective: ``(Σ w)² / (n Σ w²)`` (Kong 1992).

    Args:
        totals: reduced sums of :func:`off_policy_sums`.
        name: ``ratio`` (policy against behaviour) or ``weight`` (what the loss was multiplied by).

    Returns:
        Between 0 and 1; 1 on policy, and without tokens.
    """
    denominator = float(totals["tokens"] * totals[f"{name}_squared"])
    return float(totals[name]) ** 2 / denominator if denominator > 0 else 1.0
