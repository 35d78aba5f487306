"""Leave-one-out advantages (RLOO): the baseline of a completion is the mean reward of the others of its group."""

from __future__ import annotations

import torch


def leave_one_out_advantages(rewards_S: torch.Tensor, group_S: torch.Tensor) -> torch.Tensor:
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740, section 2.2; Kool et al. 2019).

        A_i = r_i - 1/(k - 1) · sum_{j != i} r_j = k/(k - 1) · (r_i - mean(r))        k completions of the group

    A reward that is not finite takes no part and gets advantage 0, as does the only finite one of its group. Equal
    rewards give exactly 0.

    Args:
        rewards_S: float32 ``[S]``, one per sequence; their sums are exact in float64.
        group_S: int64 ``[S]``, index of the group of each sequence, from 0.

    Returns:
        float32 ``[S]``.
    """
    if rewards_S.numel() == 0:
        return torch.zeros(0, dtype=torch.float32, device=rewards_S.device)
    valid_S = torch.isfinite(rewards_S)
    finite_S = torch.where(valid_S, rewards_S, 0.0).double()
    sums = torch.zeros(int(group_S.max()) + 1, dtype=torch.float64, device=rewards_S.device)
    total_S = sums.index_add(0, group_S, finite_S)[group_S]
    others_S = sums.index_add(0, group_S, valid_S.double())[group_S] - 1
    baseline_S = (total_S - finite_S) / others_S.clamp_min(1)
    return torch.where(valid_S & (others_S > 0), finite_S - baseline_S, 0.0).float()
