"""Weights of tokens that another policy sampled than the one that the loss takes its ratio to, and of old tokens."""

from __future__ import annotations

from typing import Literal

import torch

from learner.algorithms.ratio import bounded_ratio
from learner.algorithms.segments import sequence_sums

Correction = Literal["none", "truncate", "mask", "sequence_mask", "geometric_mask"]


def correction_weights(
    log_weights_M: torch.Tensor,
    sequence_M: torch.Tensor,
    num_sequences: int,
    kind: Correction,
    low: float,
    high: float,
) -> torch.Tensor:
    """Importance weights w = proximal / behaviour of decoupled PPO (Hilton et al. 2021, arXiv:2110.00641).

        none             w                                         (AReaL, arXiv:2505.24298)
        truncate         min(w, high)                              truncated importance sampling (Ionides 2008)
        mask             w if low <= w <= high else 0              IcePop (Ring-1T, arXiv:2510.18855)
        sequence_mask    w if low <= Π_t w_t <= high else 0        whole sequences are masked, as in
        geometric_mask   w if low <= (Π_t w_t)^(1/|y|) <= high     Trust Region Masking (arXiv:2512.23075)
                         else 0

    Args:
        log_weights_M: log w, ``[M]``.
        sequence_M: int64 ``[M]``, sequence of each token; sequences are whole.
        num_sequences: sequences in this micro-batch.
        kind: which of them.
        low: lower bound.
        high: upper bound.

    Returns:
        Weights ``[M]`` without gradient; 0 where the token is masked, and nowhere else.
    """
    log_weights_M = log_weights_M.detach()
    weights_M = bounded_ratio(log_weights_M)
    if kind == "none":
        return weights_M
    if kind == "truncate":
        return weights_M.clamp(max=high)
    judged_M = weights_M
    if kind != "mask":
        log_S = sequence_sums(log_weights_M, sequence_M, num_sequences)
        if kind == "geometric_mask":
            lengths_S = sequence_sums(torch.ones_like(log_weights_M), sequence_M, num_sequences)
            log_S = log_S / lengths_S.clamp_min(1)
        judged_M = bounded_ratio(log_S)[sequence_M]
    return torch.where((judged_M >= low) & (judged_M <= high), weights_M, 0.0)


def age_weights(ages_M: torch.Tensor, decay: float, max_age: int) -> torch.Tensor:
    """Weight by staleness: ``decay ** age``, and 0 above ``max_age`` unless that is negative; float32 ``[M]``.

    A heuristic of this kind is staleness-weighted asynchronous SGD (Zhang et al. 2015, arXiv:1511.05950).
    """
    weights_M = torch.pow(decay, ages_M.clamp_min(0).float())
    return torch.where(ages_M > max_age, 0.0, weights_M) if max_age >= 0 else weights_M
