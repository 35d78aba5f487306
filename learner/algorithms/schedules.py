"""Learning-rate rules as pure functions; every rank evaluates them on the same reduced numbers."""

from __future__ import annotations

LOWEST_LR = 1e-6
HIGHEST_LR = 1e-2
_FACTOR = 1.5


def kl_adaptive_lr(
    lr: float, kl: float, target: float, lowest: float = LOWEST_LR, highest: float = HIGHEST_LR
) -> float:
    """Keep the measured KL near its target: slower above twice the target, faster below half of it.

        kl > 2 target: lr / 1.5        kl < target / 2: 1.5 lr        limits ``lowest`` and ``highest``

    A rate beyond a limit is left where it is.

    Args:
        lr: present learning rate.
        kl: KL between behaviour and current policy, over all ranks.
        target: wanted KL.
        lowest: limit.
        highest: limit.
    """
    if kl > 2 * target:
        return max(min(lowest, lr), lr / _FACTOR)
    if kl < target / 2:
        return min(max(highest, lr), lr * _FACTOR)
    return lr


def warmup(step: int, warmup_steps: int) -> float:
    """Factor of the learning rate at ``step`` (from 0): linear up to 1, reached at step ``warmup_steps - 1``."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0
