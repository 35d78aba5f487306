"""All that a step must know of the other ranks before its first update, in one collective.

{name: numbers of this rank} ─► one float64 vector ─► sum over ranks ─► {name: numbers of all}
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from learner.group import LearnerGroup


def sum_together(group: LearnerGroup, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sum named numbers over the ranks.

    Args:
        group: the ranks; all call this with the same names and sizes.
        parts: [n] or [] each, on any device.

    Returns:
        Float64 on the CPU, shapes as given; the same on every rank.
    """
    device = group.device
    flat = torch.cat([part.to(device, torch.float64).reshape(-1) for part in parts.values()]).cpu()
    summed = group.sum_over_ranks(flat).split([part.numel() for part in parts.values()])
    return {name: total.view(part.shape) for (name, part), total in zip(parts.items(), summed, strict=True)}
