"""Loss of the critic."""

from __future__ import annotations

import torch


def value_loss(
    values_M: torch.Tensor, old_values_M: torch.Tensor, returns_M: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared error (Schulman et al. 2017, arXiv:1707.06347, eq. 9), moved at most ``clip`` from the old value.

        loss = max( (V - R)², (clip(V, V_old - clip, V_old + clip) - R)² )

    The clip is not in the paper but in its published implementation (Andrychowicz et al. 2020, arXiv:2006.05990).

    Args:
        values_M: of the critic that is trained, with gradient, ``[M]``.
        old_values_M: of the critic at the start of the step, ``[M]``.
        returns_M: targets, ``[M]``; nan where nothing scored the sequence: such a token has loss and gradient 0.
        clip: 0 for no clip.

    Returns:
        The loss ``[M]``, and bool ``[M]``: where the clip cut the gradient off.
    """
    scored_M = torch.isfinite(returns_M)
    targets_M = torch.where(scored_M, returns_M, 0.0)
    loss_M = (values_M - targets_M).square()
    cut_M = torch.zeros_like(scored_M)
    if clip > 0:
        near_M = (old_values_M + (values_M - old_values_M).clamp(-clip, clip) - targets_M).square()
        cut_M = (near_M > loss_M).detach() & scored_M
        loss_M = torch.maximum(loss_M, near_M)
    return torch.where(scored_M, loss_M, 0.0), cut_M
