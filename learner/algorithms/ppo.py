"""Clipped surrogate of PPO, with sides apart (clip-higher) and a bound for negative advantages (dual clip)."""

from __future__ import annotations

import torch

from learner.algorithms.ratio import bounded_ratio


def ppo_loss(
    logprobs_M: torch.Tensor,
    base_logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

        r = π / π_base        objective = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)        loss = -objective

    ``clip_high > clip_low`` is clip-higher (DAPO, arXiv:2503.14476, eq. 10). With ``dual_clip`` = c (Ye et al. 2019,
    arXiv:1912.09729, dual-clip PPO) the objective is ``max(min(...), c A)`` where A < 0, so that a large ratio cannot
    push without bound.

    Args:
        logprobs_M: of the policy that is trained, with gradient, ``[M]``.
        base_logprobs_M: of the policy that the ratio is taken to, ``[M]``.
        advantages_M: ``[M]``.
        clip_low: lower side.
        clip_high: upper side.
        dual_clip: c, above 1; 0: none.

    Returns:
        The loss ``[M]``, and bool ``[M]``: where a clip cut the gradient off.
    """
    ratio_M = bounded_ratio(logprobs_M - base_logprobs_M)
    plain_M = ratio_M * advantages_M
    clipped_M = ratio_M.clamp(1 - clip_low, 1 + clip_high) * advantages_M
    objective_M = torch.minimum(plain_M, clipped_M)
    cut_M = clipped_M < plain_M
    if dual_clip > 0:
        bound_M = dual_clip * advantages_M
        beyond_M = (advantages_M < 0) & (objective_M < bound_M)
        objective_M = torch.where(beyond_M, bound_M, objective_M)
        cut_M = cut_M | beyond_M
    return -objective_M, cut_M.detach()
