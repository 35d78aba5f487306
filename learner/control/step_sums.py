"""The numbers of a step that all ranks add up before its first update, and what they say.

advantages, values, returns, rewards [T, N] ─► sums, float64 ─► (tally.py) ─► normalised advantages, metrics
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from async_rl.control.distributions import Distribution
from async_rl.metrics import Metrics
from learner.control.rollout import Rollout

_EPS = 1e-8
"""Added to the deviation of the advantages, as rsl_rl does."""


def moments(values: torch.Tensor, acted: torch.Tensor) -> torch.Tensor:
    """Count, sum and sum of squares of what counts of [T, N]: float64 [3]."""
    counted = (values * acted).double()
    return torch.stack([acted.sum(), counted.sum(), counted.square().sum()])


def normalized(advantages: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """Advantages in standard deviations from their mean, both over all ranks.

        (A - mean) / (std + 1e-8)        std with n - 1, as rsl_rl's; 0 where there is one sample or all are equal

    Args:
        advantages: float32 [T, N]
        totals: :func:`moments` of all ranks.
    """
    count, total, squares = totals.tolist()
    mean = total / max(1.0, count)
    variance = max(0.0, squares - count * mean**2) / max(1.0, count - 1)
    return (advantages - mean) / (variance**0.5 + _EPS)


def fit(values: torch.Tensor, returns: torch.Tensor, acted: torch.Tensor) -> torch.Tensor:
    """Sum of squared errors of the critic, count, sum and sum of squares of the returns: float64 [4]."""
    error = ((values - returns) * acted).double().square().sum()
    return torch.cat((error.view(1), moments(returns, acted)))


def step_sums(rollout: Rollout, distribution: Distribution, step: int) -> torch.Tensor:
    """Steps that acted, sums of their rewards, ages and policy's deviation, this rank's 1: float64 [5]."""
    acted = rollout.acted
    noise = distribution.noise()
    ages = (step - rollout.versions) * acted
    deviation = torch.zeros((), device=acted.device) if noise is None else noise.detach()
    found = (acted.sum(), (rollout.rewards * acted).sum(), ages.sum(), deviation, torch.ones((), device=acted.device))
    return torch.stack([number.double() for number in found])


def step_facts(totals: Mapping[str, torch.Tensor], has_noise: bool) -> Metrics:
    """What the sums say: rewards, ages, noise of the policy, fit of the critic.

    Args:
        totals: over all ranks: ``steps`` of :func:`step_sums`, ``advantages`` of :func:`moments`, ``fit`` of
            :func:`fit`.
        has_noise: whether the policy has a deviation.
    """
    count, advantage, squares = totals["advantages"].tolist()
    count = max(1.0, count)
    mean = advantage / count
    return acting_facts(totals["steps"], has_noise) | {
        "advantage/mean": mean,
        "advantage/std": max(0.0, squares / count - mean**2) ** 0.5,
        "value/explained_variance": _explained_variance(totals["fit"]),
    }


def acting_facts(totals: torch.Tensor, has_noise: bool) -> Metrics:
    """The part of :func:`step_facts` that :func:`step_sums` tells, for methods without a critic."""
    steps, rewards, ages, noise, ranks = totals.tolist()
    steps = max(1.0, steps)
    return {
        "reward/mean": rewards / steps,
        "age/mean": ages / steps,
        "policy/std": noise / ranks if has_noise else None,
    }


def _explained_variance(totals: torch.Tensor) -> float | None:
    """Share of the returns' variance that the critic predicts, 1 - Σ(V - R)² / Σ(R - mean)²."""
    error, count, total, squares = totals.tolist()
    spread = squares - total**2 / max(1.0, count)
    return 1.0 - error / spread if spread > 1e-6 * count else None
