"""Reward-to-go advantages of REINFORCE++: no group, no critic; the global batch is the baseline.

rewards_to_go ─► moments, reduced over ranks ─► whiten        (learner/algorithms/whitening.py)
"""

from __future__ import annotations

import torch

from learner.algorithms.segments import discounted_to_go


def rewards_to_go(rewards_S: torch.Tensor, penalties_M: torch.Tensor, sequence_M: torch.Tensor) -> torch.Tensor:
    """REINFORCE++ (Hu 2025, arXiv:2501.03262), before its normalisation over the global batch.

        A_t = r - sum_{u >= t} penalty_u        penalty = β · KL estimate of the token; 0 without a KL in the reward

    Args:
        rewards_S: float ``[S]``, one per sequence.
        penalties_M: float ``[M]``, one per trained token.
        sequence_M: int64 ``[M]``, sequence of each token.

    Returns:
        float32 ``[M]``. Tokens of a sequence whose reward is not finite are not finite either: ``moments`` leaves them
        out and ``whiten`` makes them 0.
    """
    return (rewards_S.double()[sequence_M] - discounted_to_go(penalties_M, sequence_M, 1.0)).float()
