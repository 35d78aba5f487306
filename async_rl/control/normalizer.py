"""Running mean and variance of observations, as buffers that lie in the flat vector and travel with the weights.

x [.., D] on each rank ─► moments ─► sum over ranks ─► update ─► mean, var, count        forward: (x − mean) / (σ + ε)
"""

from __future__ import annotations

import torch
from torch import nn

_EPS = 1e-2
"""Added to the deviation, as rsl_rl does."""


class Normalizer(nn.Module):
    """Normalises by the mean and deviation of everything that was merged into it; float32 buffers throughout.

    Args:
        size: D, numbers of an observation.
    """

    mean: torch.Tensor
    """[D]"""
    var: torch.Tensor
    """[D], of the population."""
    count: torch.Tensor
    """[]: samples so far; a float32, so it is rounded beyond 2^24, where one sample more changes nothing."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalised x [.., D]: (x − mean) / (sqrt(var) + 0.01)."""
        return (x - self.mean) / (self.var.sqrt() + _EPS)

    @torch.no_grad()
    def moments(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Sums that add up over ranks and fragments: float64 [1 + 2D], count, Σ(x − m), Σ(x − m)².

        They are taken about the running mean m, the same on all ranks, so that no digits cancel.

        Args:
            x: float32 [.., D]; finite.
            mask: bool [..], which of them count; None: all.
        """
        centred = (x - self.mean).double().reshape(-1, self.mean.shape[0])
        if mask is None:
            count = centred.new_full((1,), centred.shape[0])
        else:
            counted = mask.reshape(-1, 1)
            centred.mul_(counted)
            count = counted.sum(dtype=torch.float64).view(1)
        first = centred.sum(0)
        second = centred.square_().sum(0)
        return torch.cat((count, first, second))

    @torch.no_grad()
    def update(self, moments: torch.Tensor) -> None:
        """Merge what :meth:`moments` gave, summed over all ranks and fragments; the mean did not change in between."""
        count, (first, second) = moments[0], moments[1:].view(2, -1)
        shift = first / count.clamp(min=1)
        var = (second / count.clamp(min=1) - shift.square()).clamp_(min=0)
        self.merge(count, self.mean.double() + shift, var)

    @torch.no_grad()
    def merge(self, count: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> None:
        """Take in a batch by its statistics (Chan, Golub, LeVeque 1979, eq. 2.1); computed in float64.

        Args:
            count: samples of the batch, []; with 0 nothing changes.
            mean: [D]
            var: [D], of the population.
        """
        share = count.double() / (self.count.double() + count).clamp(min=1)  # of the batch in the whole
        old_mean, old_var = self.mean.double(), self.var.double()
        delta = mean.double() - old_mean
        self.mean.copy_(old_mean + share * delta)
        self.var.copy_(old_var + share * (var.double() - old_var + (1 - share) * delta.square()))
        self.count.add_(count.to(self.count.dtype))
