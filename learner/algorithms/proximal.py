"""A proximal policy without a second forward pass, for decoupled PPO."""

from __future__ import annotations

import torch


def interpolated_logprobs(
    behaviour_logprobs_M: torch.Tensor, logprobs_M: torch.Tensor, ages_M: torch.Tensor
) -> torch.Tensor:
    """Staleness-aware interpolation between the behaviour's and the current policy (A-3PO, arXiv:2512.06547).

        log π_prox = α log μ + (1 - α) log π        α = 0 at age 0, 1 / age above

    Args:
        behaviour_logprobs_M: of the policy that sampled, ``[M]``.
        logprobs_M: of the policy that is trained, ``[M]``.
        ages_M: int64 ``[M]``, versions between the two.

    Returns:
        ``[M]``, without gradient.
    """
    alpha_M = torch.where(ages_M > 0, 1.0 / ages_M.clamp_min(1), 0.0)
    return torch.lerp(logprobs_M.detach(), behaviour_logprobs_M, alpha_M.to(logprobs_M.dtype))
