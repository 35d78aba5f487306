"""KL to the reference from single samples, and the controller of its weight."""

from __future__ import annotations

from typing import Literal

import torch

from learner.algorithms.ratio import MAX_LOG_RATIO

KlEstimator = Literal["k1", "k2", "k3"]

_LARGEST_ERROR = 0.2
_GAIN = 0.1


def kl_estimate(estimator: KlEstimator, logprobs_M: torch.Tensor, ref_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(policy || reference) from tokens of the policy (Schulman 2020, "Approximating KL divergence").

        d = log π_ref - log π        k1 = -d        k2 = d² / 2        k3 = exp(d) - 1 - d

    k1 is unbiased and may be negative; k2 is biased with little variance; k3 is unbiased and never negative (it is the
    KL of GRPO, arXiv:2402.03300, eq. 4). In k3 ``d`` is at most ``MAX_LOG_RATIO``, so that it stays finite.

    Args:
        estimator: which one.
        logprobs_M: of the policy, with or without gradient, ``[M]``.
        ref_logprobs_M: of the frozen reference, ``[M]``.

    Returns:
        ``[M]``.
    """
    difference_M = ref_logprobs_M - logprobs_M
    if estimator == "k1":
        return -difference_M
    if estimator == "k2":
        return difference_M.square() / 2
    bounded_M = difference_M.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(bounded_M) - bounded_M


def adapt_kl_coef(coef: float, kl: float, target: float) -> float:
    """New β from the measured KL (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

        e = clip(kl / target - 1, -0.2, 0.2)        β' = β · (1 + 0.1 e)

    Args:
        coef: β now.
        kl: measured KL to the reference per token, over all ranks.
        target: wanted KL per token.
    """
    error = min(max(kl / target - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
    return coef * (1.0 + _GAIN * error)
