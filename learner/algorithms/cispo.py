"""CISPO: the importance weight is clipped, not the update, so every token keeps its gradient."""

from __future__ import annotations

import torch

from learner.algorithms.ratio import bounded_ratio


def cispo_loss(
    logprobs_M: torch.Tensor,
    base_logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO (MiniMax 2025, arXiv:2506.13585, eq. 4 and 5).

        loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) · A · log π        r = π / π_base

    ``clip_low = 1`` leaves the lower side open (a ratio is never below 0), as in the paper.

    Args:
        logprobs_M: of the policy that is trained, with gradient, ``[M]``.
        base_logprobs_M: of the policy that the ratio is taken to, ``[M]``.
        advantages_M: ``[M]``.
        clip_low: lower side.
        clip_high: upper side.

    Returns:
        The loss ``[M]``, and bool ``[M]``: where the weight was clipped.
    """
    ratio_M = bounded_ratio((logprobs_M - base_logprobs_M).detach())
    weight_M = ratio_M.clamp(1 - clip_low, 1 + clip_high)
    return -weight_M * advantages_M * logprobs_M, weight_M != ratio_M
