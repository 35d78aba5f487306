"""Group-relative advantages (GRPO, Dr.GRPO): how much better than its group a completion was."""

from __future__ import annotations

import torch

_EPSILON = 1e-6


def group_advantages(rewards_S: torch.Tensor, group_S: torch.Tensor, normalize_std: bool) -> torch.Tensor:
    """Group-relative advantages of GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

        A_i = (r_i - mean(r)) / (std(r) + 1e-6)        mean and (population) std over the group of i

    A group whose rewards are all equal teaches nothing: its advantages are exactly 0. A reward that is not finite
    (nothing could score it) takes no part in mean and std and gets advantage 0.

    Args:
        rewards_S: float ``[S]``, one per sequence.
        group_S: int64 ``[S]``, index of the group of each sequence, from 0.
        normalize_std: divide by the standard deviation; without it only the mean is subtracted (arXiv:2503.20783).

    Returns:
        float32 ``[S]``.
    """
    if rewards_S.numel() == 0:
        return torch.zeros(0, dtype=torch.float32, device=rewards_S.device)
    valid_S = torch.isfinite(rewards_S)
    finite_S = torch.where(valid_S, rewards_S, 0.0).double()
    num_groups = int(group_S.max()) + 1

    def mean_of_group(values_S: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(num_groups, dtype=torch.float64, device=values_S.device)
        counts = sums.index_add(0, group_S, valid_S.double()).clamp_min(1)
        return (sums.index_add(0, group_S, values_S * valid_S) / counts)[group_S]

    centred_S = (finite_S - mean_of_group(finite_S)) * valid_S
    std_S = mean_of_group(centred_S.square()).sqrt()
    # Rounding leaves a trace of a mean of equal numbers, which the division would blow up.
    varied_S = std_S > 1e-9 * (1 + mean_of_group(finite_S).abs())
    scaled_S = centred_S / (std_S + _EPSILON) if normalize_std else centred_S
    return torch.where(varied_S, scaled_S, 0.0).float()
