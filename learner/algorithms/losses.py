"""Per-token losses and their aggregation over global counts. Everything is a pure function of tensors.

``M`` is the axis of trained tokens of one micro-batch, all sequences concatenated.
"""

from __future__ import annotations

from typing import Literal

import torch


def clipped_ratio_loss(
    logprobs_M: torch.Tensor,
    behaviour_logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7), sides apart (DAPO, arXiv:2503.14476).

        r = pi(a|s) / mu(a|s)        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Args:
        logprobs_M: of the policy that is trained, with gradient, ``[M]``.
        behaviour_logprobs_M: of the policy that sampled, ``[M]``.
        advantages_M: ``[M]``.
        clip_low: lower side.
        clip_high: upper side.

    Returns:
        The loss ``[M]``, and bool ``[M]``: where the clip cut the gradient off.
    """
    ratio_M = (logprobs_M - behaviour_logprobs_M).exp()
    plain_M = ratio_M * advantages_M
    clipped_M = ratio_M.clamp(1 - clip_low, 1 + clip_high) * advantages_M
    return -torch.minimum(plain_M, clipped_M), (clipped_M < plain_M).detach()


def k3_kl(logprobs_M: torch.Tensor, ref_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(policy || reference) per token, never negative (GRPO, arXiv:2402.03300, eq. 4).

        k3 = exp(d) - 1 - d        d = log pi_ref - log pi

    Args:
        logprobs_M: of the policy, with gradient, ``[M]``.
        ref_logprobs_M: of the frozen reference, ``[M]``.

    Returns:
        ``[M]``.
    """
    difference_M = ref_logprobs_M - logprobs_M
    return torch.expm1(difference_M) - difference_M


def aggregate(
    per_token_M: torch.Tensor,
    sequence_lengths_M: torch.Tensor,
    aggregation: Literal["token", "sequence"],
    num_tokens: int,
    num_sequences: int,
) -> torch.Tensor:
    """Part of the mean over the *global* mini-batch; the parts of all ranks and micro-batches add up to it.

        token:     sum_t x_t / num_tokens                      (DAPO, arXiv:2503.14476, eq. 8)
        sequence:  sum_i mean_t(x_it) / num_sequences          (GRPO, arXiv:2402.03300, eq. 3)

    Args:
        per_token_M: ``[M]``.
        sequence_lengths_M: number of trained tokens of the sequence that each token belongs to, ``[M]``.
        aggregation: which mean.
        num_tokens: trained tokens of the mini-batch over all ranks.
        num_sequences: sequences of the mini-batch over all ranks.

    Returns:
        Scalar ``[]``.
    """
    if aggregation == "token":
        return per_token_M.sum() / num_tokens
    return (per_token_M / sequence_lengths_M).sum() / num_sequences
