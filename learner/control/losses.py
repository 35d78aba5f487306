"""The losses of PPO over samples [m], as sums: whoever calls divides by the samples of all ranks. Pure.

log π, log π_old, A ─► surrogate_sum        V, V_old, R ─► value_sum        (as rsl_rl has them)
"""

from __future__ import annotations

import torch

from learner.algorithms.ratio import MAX_LOG_RATIO


def surrogate_sum(
    log_ratios: torch.Tensor, advantages: torch.Tensor, clip: float, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7), to be minimised.

        Σ w max(-A r, -A clamp(r, 1 - ε, 1 + ε))        r = exp(log_ratios)

    Log-ratios beyond ``MAX_LOG_RATIO`` count as that, without a gradient: one wild sample leaves the sum finite.

    With weights it is the decoupled objective (Hilton et al. 2021, arXiv:2110.00641): r to the proximal policy, w the
    proximal policy's to the one that acted.

    Args:
        log_ratios: [m], of the current policy to the old (or proximal) one.
        advantages: A [m]
        clip: ε
        weights: w [m]

    Returns:
        The sum, and the number of samples whose ratio lies outside; both [].
    """
    ratios = log_ratios.clamp(max=MAX_LOG_RATIO).exp()
    clipped = ratios.clamp(1 - clip, 1 + clip)
    gains = torch.minimum(ratios * advantages, clipped * advantages)
    outside = (ratios != clipped).sum()
    return -(gains.sum() if weights is None else torch.dot(gains, weights)), outside


def value_sum(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """Clipped value loss, without a factor 1/2.

        Σ max((V - R)², (V_old + clamp(V - V_old, ±clip) - R)²)        clip = 0: Σ (V - R)²

    Args:
        values: V [m], of the current critic.
        old_values: V_old [m], of the critic of the step's start.
        returns: R [m]
        clip: how far a value may move before it has no gradient.
    """
    errors = (values - returns).square()
    if clip == 0:
        return errors.sum()
    moved = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(errors, (moved - returns).square()).sum()
