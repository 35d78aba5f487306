"""AdamW over the flat vector: one fused step whatever the number of tensors, and a state of two flat moments."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from learner.flat import FlatParameters
from learner.parking import Parkable

_MOMENTS = ("exp_avg", "exp_avg_sq")


class FlatAdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) on the master vector of :class:`FlatParameters`.

    Each role has a learning rate of its own. Weight decay, when set, applies to every element.

    Args:
        flat: the vectors; its gradient must be reduced before :meth:`step`.
        betas: decay rates of the two moments.
        weight_decay: decoupled decay.
    """

    def __init__(self, flat: FlatParameters, betas: tuple[float, float], weight_decay: float) -> None:
        self._flat = flat
        self._parameters: dict[str, nn.Parameter] = {}
        for role in flat.roles:
            span = flat.trained_span(role)
            self._parameters[role] = nn.Parameter(flat.data[span])
            self._parameters[role].grad = flat.grad[span]
        groups = [{"params": [parameter]} for parameter in self._parameters.values()]
        self._adamw = torch.optim.AdamW(groups, betas=betas, weight_decay=weight_decay, fused=True)
        self._parked: list[dict[str, Parkable]] = []

    def step(self, rates: Mapping[str, float]) -> None:
        """Update ``flat.data`` with its present gradient, then the working copy; ``rates`` by role."""
        for role, group in zip(self._parameters, self._adamw.param_groups, strict=True):
            group["lr"] = rates[role]
        self._adamw.step()
        self._flat.refresh()

    def state(self) -> dict[str, torch.Tensor]:
        """Moments ``[size]`` and step count ``[]`` on the CPU, for a checkpoint; independent of the number of ranks."""
        states = self._states()
        if not all(states):
            zeros = torch.zeros(self._flat.size)
            return {"exp_avg": zeros, "exp_avg_sq": zeros.clone(), "step": torch.zeros(())}
        parts = self._parked or [{name: Parkable(state[name]) for name in _MOMENTS} for state in states]
        moments = {name: torch.zeros(self._flat.size) for name in _MOMENTS}
        for role, part in zip(self._parameters, parts, strict=True):
            for name, whole in moments.items():
                whole[self._flat.trained_span(role)] = part[name].on_cpu()
        return moments | {"step": states[0]["step"].detach().cpu().clone()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from :meth:`state`.

        Raises:
            ValueError: the moments belong to a vector of another size.
        """
        if state["exp_avg"].numel() != self._flat.size:
            raise ValueError(f"moments of {state['exp_avg'].numel()} elements for a vector of {self._flat.size}")
        device = self._flat.data.device
        for role, parameter in self._parameters.items():
            span = self._flat.trained_span(role)
            moments = {name: state[name][span].clone().to(device, torch.float32) for name in _MOMENTS}
            self._adamw.state[parameter] = moments | {"step": state["step"].clone().to(device, torch.float32)}
        self._parked = []

    def offload(self) -> None:
        """Give the moments' device memory back."""
        if not self._parked and all(self._states()):
            self._parked = [{name: Parkable(state[name]) for name in _MOMENTS} for state in self._states()]
        for parkable in self._parkables():
            parkable.offload()

    def restore(self) -> None:
        """Take it again."""
        for parkable in self._parkables():
            parkable.restore()

    def _states(self) -> list[dict[str, torch.Tensor]]:
        return [self._adamw.state[parameter] for parameter in self._parameters.values()]

    def _parkables(self) -> list[Parkable]:
        return [parkable for part in self._parked for parkable in part.values()]


def clip_flat(gradient: torch.Tensor, max_norm: float) -> float:
    """Scale a flat gradient ``[size]`` in place to at most ``max_norm``; return its L2 norm before.

    A non-finite gradient is left as it is, and so is its norm: its update must be skipped.
    """
    norm = float(torch.linalg.vector_norm(gradient))
    if math.isfinite(norm) and norm > max_norm:
        gradient.mul_(max_norm / norm)
    return norm
