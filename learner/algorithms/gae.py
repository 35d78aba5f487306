"""Generalised advantage estimation over the trained tokens of each sequence."""

from __future__ import annotations

import torch

from learner.algorithms.segments import discounted_to_go, following, sequence_sums


def generalized_advantages(
    rewards_M: torch.Tensor, values_M: torch.Tensor, sequence_M: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE(γ, λ) (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

        δ_t = r_t + γ V_{t+1} - V_t        A_t = δ_t + γλ A_{t+1}        return_t = A_t + V_t

    The episode ends at the sequence's last trained token: the value after it is 0. Tool output between trained tokens
    is part of the environment, so the next trained token is the next state.

    Args:
        rewards_M: ``[M]``: the outcome at each sequence's last token, minus KL penalties at every token.
        values_M: ``[M]``, value of the state in which each token was sampled.
        sequence_M: int64 ``[M]``, sequence of each token.
        gamma: discount per token.
        lam: λ.

    Returns:
        Advantages and returns, float32 ``[M]`` each. Both are nan for all tokens of a sequence that holds a reward
        that is not finite: ``whiten`` makes such advantages 0, ``value_loss`` skips such returns.
    """
    if rewards_M.numel() == 0:
        return rewards_M.float(), rewards_M.float()
    rewards_M, values_M = rewards_M.double(), values_M.double()
    unscored_M = (~torch.isfinite(rewards_M)).double()
    unscored_S = sequence_sums(unscored_M, sequence_M, int(sequence_M.max()) + 1)
    deltas_M = rewards_M + gamma * following(values_M, sequence_M) - values_M
    advantages_M = discounted_to_go(deltas_M, sequence_M, gamma * lam)
    advantages_M = torch.where(unscored_S[sequence_M] > 0, torch.nan, advantages_M)
    return advantages_M.float(), (advantages_M + values_M).float()
