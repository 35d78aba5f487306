"""AdamW over the flat vector: one fused step whatever the number of tensors, and a state of two flat moments."""

from __future__ import annotations

import math

import torch
from torch import nn

from learner.flat import FlatParameters


class FlatAdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) on the master vector of :class:`FlatParameters`.

    Weight decay, when set, applies to every element.

    Args:
        flat: the vectors; its gradient must be reduced before :meth:`step`.
        betas: decay rates of the two moments.
        weight_decay: decoupled decay.
    """

    def __init__(self, flat: FlatParameters, betas: tuple[float, float], weight_decay: float) -> None:
        self._flat = flat
        self._parameter = nn.Parameter(flat.data)
        self._parameter.grad = flat.grad
        self._adamw = torch.optim.AdamW([self._parameter], betas=betas, weight_decay=weight_decay, fused=True)

    def step(self, lr: float) -> None:
        """Update ``flat.data`` with its present gradient, then the working copy."""
        self._adamw.param_groups[0]["lr"] = lr
        self._adamw.step()
        self._flat.refresh()

    def state(self) -> dict[str, torch.Tensor]:
        """Moments ``[size]`` and step count ``[]`` on the CPU, for a checkpoint; independent of the number of ranks."""
        state = self._adamw.state[self._parameter]
        if not state:
            zeros = torch.zeros(self._flat.size)
            return {"exp_avg": zeros, "exp_avg_sq": zeros.clone(), "step": torch.zeros(())}
        return {name: state[name].detach().cpu().clone() for name in ("exp_avg", "exp_avg_sq", "step")}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from :meth:`state`.

        Raises:
            ValueError: the moments belong to a vector of another size.
        """
        if state["exp_avg"].numel() != self._flat.size:
            raise ValueError(f"moments of {state['exp_avg'].numel()} elements for a vector of {self._flat.size}")
        device = self._flat.data.device
        self._adamw.state[self._parameter] = {name: tensor.to(device, torch.float32) for name, tensor in state.items()}


def clip_flat(gradient: torch.Tensor, max_norm: float) -> float:
    """Scale a flat gradient ``[size]`` in place to at most ``max_norm``; return its L2 norm before.

    A non-finite gradient is left as it is, and so is its norm: its update must be skipped.
    """
    norm = float(torch.linalg.vector_norm(gradient))
    if math.isfinite(norm) and norm > max_norm:
        gradient.mul_(max_norm / norm)
    return norm
