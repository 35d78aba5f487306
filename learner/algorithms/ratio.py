"""The probability ratio that every policy loss and correction is made of, kept finite."""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before ``exp``: e^20 is about 5e8, and its square still fits float32. Beyond it the
gradient is 0, so a wild token can never turn a loss into inf or nan."""


def bounded_ratio(log_ratio_M: torch.Tensor) -> torch.Tensor:
    """``exp(clamp(log_ratio, ±MAX_LOG_RATIO))``, same shape, differentiable."""
    return log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
