"""Normalisation over the global batch: moments that add up over ranks, and what they make of the values."""

from __future__ import annotations

import torch

_EPSILON = 1e-6


def moments(values_M: torch.Tensor) -> torch.Tensor:
    """Count, sum and sum of squares of the finite values, float64 ``[3]``; the moments of all ranks add up."""
    finite_M = values_M[torch.isfinite(values_M)].double()
    count = torch.full_like(finite_M, 1.0).sum()
    return torch.stack([count, finite_M.sum(), finite_M.square().sum()])


def whiten(values_M: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """Values in standard deviations from the global mean (REINFORCE++, arXiv:2501.03262).

        A' = (A - mean) / (std + 1e-6)        population std; 0 where all values are equal

    Args:
        values_M: float32 ``[M]``, of this rank.
        moments: float64 ``[3]``, of all ranks: see :func:`moments`.

    Returns:
        float32 ``[M]``; values that are not finite (nothing scored them) become 0.
    """
    count, total, square = (float(moment) for moment in moments)
    mean = total / max(1.0, count)
    variance = max(0.0, square / max(1.0, count) - mean**2)  # rounding may leave less than nothing
    whitened_M = (values_M.double() - mean) / (variance**0.5 + _EPSILON)
    return torch.where(torch.isfinite(values_M), whitened_M, 0.0).float()
