"""AdamW over the flat vector: one fused step whatever the number of tensors, and a state of two flat moments."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.optim.adamw import adamw

from learner.flat import FlatParameters
from learner.parking import Parkable

_MOMENTS = ("exp_avg", "exp_avg_sq")
_EPS = 1e-8


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
        self._betas = betas
        self._weight_decay = weight_decay
        self._spans = {role: flat.trained_span(role) for role in flat.roles}
        self._states: dict[str, dict[str, torch.Tensor]] = {}
        """Moments and step count by role, from the first step on."""
        self._parked: list[dict[str, Parkable]] = []

    @torch.no_grad()
    def step(self, rates: Mapping[str, float]) -> None:
        """Update ``flat.data`` with its present gradient, then the working copy; ``rates`` by role."""
        if not self._states:
            self._states = {role: self._fresh_state(span) for role, span in self._spans.items()}
        # the function under torch.optim.AdamW: the class imports torch's compiler, which takes longer than torch itself
        for role, span in self._spans.items():
            state = self._states[role]
            adamw(
                [self._flat.data[span]],
                [self._flat.grad[span]],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [],
                [state["step"]],
                fused=True,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=rates[role],
                weight_decay=self._weight_decay,
                eps=_EPS,
                maximize=False,
            )
        self._flat.refresh()

    def state(self) -> dict[str, torch.Tensor]:
        """Moments ``[size]`` and step count ``[]`` on the CPU, for a checkpoint; independent of the number of ranks."""
        moments = {name: torch.zeros(self._flat.size) for name in _MOMENTS}
        if not self._states:
            return moments | {"step": torch.zeros(())}
        parts = self._parked or self._parkable_moments()
        for span, part in zip(self._spans.values(), parts, strict=True):
            for name, whole in moments.items():
                whole[span] = part[name].on_cpu()
        step = next(iter(self._states.values()))["step"]
        return moments | {"step": step.detach().cpu().clone()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from :meth:`state`.

        Raises:
            ValueError: the moments belong to a vector of another size.
        """
        if state["exp_avg"].numel() != self._flat.size:
            raise ValueError(f"moments of {state['exp_avg'].numel()} elements for a vector of {self._flat.size}")
        device = self._flat.data.device
        for role, span in self._spans.items():
            moments = {name: state[name][span].clone().to(device, torch.float32) for name in _MOMENTS}
            self._states[role] = moments | {"step": state["step"].clone().to(device, torch.float32)}
        self._parked = []

    def offload(self) -> None:
        """Give the moments' device memory back."""
        if not self._parked and self._states:
            self._parked = self._parkable_moments()
        for parkable in self._parkables():
            parkable.offload()

    def restore(self) -> None:
        """Take it again."""
        for parkable in self._parkables():
            parkable.restore()

    def _fresh_state(self, span: slice) -> dict[str, torch.Tensor]:
        part = self._flat.data[span]
        return {name: torch.zeros_like(part) for name in _MOMENTS} | {"step": part.new_zeros(())}

    def _parkable_moments(self) -> list[dict[str, Parkable]]:
        return [{name: Parkable(state[name]) for name in _MOMENTS} for state in self._states.values()]

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
