"""GSPO: one ratio for a whole sequence, the geometric mean of its tokens' ratios."""

from __future__ import annotations

import torch

from learner.algorithms.ppo import ppo_loss
from learner.algorithms.segments import sequence_sums


def gspo_loss(
    logprobs_M: torch.Tensor,
    base_logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    sequence_M: torch.Tensor,
    num_sequences: int,
    clip_low: float,
    clip_high: float,
    kept_M: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071, eq. 5 and 7), in the form of GSPO-token (eq. 13 and 14).

        s_i  = exp( 1/|y_i| sum_t log(π / π_base) )
        s_it = sg(s_i) · π_t / sg(π_t)                     equal to s_i; its gradient is s_i ∇log π_t
        loss_it = -min(s_it A, clip(s_it, 1 - clip_low, 1 + clip_high) A)

    The mean over a sequence's tokens (``aggregation = "sequence"``) is the paper's loss of that sequence in value and
    in gradient, when all its tokens have one advantage. The token form keeps masked tokens without gradient.

    Args:
        logprobs_M: of the policy that is trained, with gradient, ``[M]``.
        base_logprobs_M: of the policy that the ratio is taken to, ``[M]``.
        advantages_M: ``[M]``.
        sequence_M: int64 ``[M]``, sequence of each token; sequences are whole.
        num_sequences: sequences in this micro-batch.
        clip_low: lower side.
        clip_high: upper side.
        kept_M: bool ``[M]``: tokens that take part in ``s_i`` (those that are not masked).

    Returns:
        The loss ``[M]``, and bool ``[M]``: where the clip cut the gradient off.
    """
    log_ratio_M = torch.where(kept_M, (logprobs_M - base_logprobs_M).detach(), 0.0)
    lengths_S = sequence_sums(kept_M.to(log_ratio_M.dtype), sequence_M, num_sequences).clamp_min(1)
    mean_S = sequence_sums(log_ratio_M, sequence_M, num_sequences) / lengths_S
    # log s_it - log π_t is a constant, which makes this PPO against a base that gives every token its sequence's ratio.
    return ppo_loss(logprobs_M, logprobs_M.detach() - mean_S[sequence_M], advantages_M, clip_low, clip_high)
