"""Plain importance weighting: the unbiased off-policy policy gradient, without any clip."""

from __future__ import annotations

import torch

from learner.algorithms.ratio import bounded_ratio


def importance_loss(
    logprobs_M: torch.Tensor, base_logprobs_M: torch.Tensor, advantages_M: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Surrogate of conservative policy iteration (Schulman et al. 2017, arXiv:1707.06347, eq. 6).

        loss = -r A        r = π / π_base        gradient -r A ∇log π

    Args:
        logprobs_M: of the policy that is trained, with gradient, ``[M]``.
        base_logprobs_M: of the policy that the ratio is taken to, ``[M]``.
        advantages_M: ``[M]``.

    Returns:
        The loss ``[M]``, and bool ``[M]``, all False: nothing is clipped.
    """
    loss_M = -bounded_ratio(logprobs_M - base_logprobs_M) * advantages_M
    return loss_M, torch.zeros_like(advantages_M, dtype=torch.bool)
