"""Soft punishment of answers that come close to the length limit."""

from __future__ import annotations

import torch


def overlong_penalty(lengths_S: torch.Tensor, longest: int, buffer: int) -> torch.Tensor:
    """Soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13); it is added to the reward.

        0                                     length <= longest - buffer
        ((longest - buffer) - length) / buffer        up to longest
        -1                                    beyond

    Args:
        lengths_S: sampled tokens of each sequence, ``[S]``.
        longest: most tokens that can be sampled.
        buffer: width of the slope in tokens, above 0.

    Returns:
        float32 ``[S]``, between -1 and 0.
    """
    return (((longest - buffer) - lengths_S) / buffer).clamp(-1.0, 0.0).float()
