"""The step's scalars by name, as views of the flat gradient's tail, so that they are reduced with the gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Totals = dict[str, torch.Tensor]
"""Reduced scalars ``[]`` and histograms ``[bins]`` by name, float64 on the CPU."""


class Scalars:
    """Named sums in a tail ``[sum(sizes)]``.

    Args:
        tail: the memory; cleared by whoever owns it.
        sizes: number of elements of each sum.
    """

    def __init__(self, tail: torch.Tensor, sizes: Mapping[str, int]) -> None:
        self._tail = tail
        self._sizes = dict(sizes)
        self._views = dict(zip(sizes, tail.split(list(sizes.values())), strict=True))

    def add(self, sums: Mapping[str, torch.Tensor | float]) -> None:
        """Add to the named sums."""
        for name, value in sums.items():
            self._views[name] += value

    def read(self) -> Totals:
        """Copy all sums out (one transfer from the device); they stay when the tail is cleared."""
        parts = self._tail.to("cpu", torch.float64, copy=True).split(list(self._sizes.values()))
        return {
            name: part.squeeze(0) if len(part) == 1 else part for name, part in zip(self._sizes, parts, strict=True)
        }
