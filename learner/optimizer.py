"""AdamW over the flat vector: one fused step whatever the number of tensors, and a state of two flat moments.

    whole                  every rank has all moments and makes the same step
    sharded (a group)      every rank has the moments of its slice and steps that ─► one all_gather of the slices

The reduced gradient is whole on every rank either way, so clipping and skipping do not know which one it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch.optim.adamw import adamw

from learner.flat import FlatParameters
from learner.parking import Parkable
from learner.slots import ALIGN

if TYPE_CHECKING:
    from learner.group import LearnerGroup

MOMENTS = ("exp_avg", "exp_avg_sq")
EPS = 1e-8


class FlatAdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) on the master vector of :class:`FlatParameters`.

    Each role has a learning rate of its own. Weight decay, when set, applies to every element.

    Args:
        flat: the vectors; its gradient must be reduced before :meth:`step`.
        betas: decay rates of the two moments.
        weight_decay: decoupled decay.
        group: ranks that share the state (ZeRO stage 1, Rajbhandari et al. 2020, arXiv:1910.02054); None: whole.
    """

    def __init__(
        self, flat: FlatParameters, betas: tuple[float, float], weight_decay: float, group: LearnerGroup | None = None
    ) -> None:
        self._flat = flat
        self._betas = betas
        self._weight_decay = weight_decay
        self._group = group
        self._spans = [(role, flat.trained_span(role)) for role in flat.roles]
        if group is not None:
            own = owned(flat.size, group.rank, group.world)
            self._spans = [(role, overlap(span, o)) for role, span in self._spans for o in own]
        self._states: list[dict[str, torch.Tensor]] = []
        """Moments and step count of each span, from the first step on."""
        self._parked: list[dict[str, Parkable]] = []

    def clip(self, max_norm: float) -> float:
        """Scale the reduced gradient, see :func:`clip_flat`."""
        return clip_flat(self._flat.grad, max_norm)

    @torch.no_grad()
    def step(self, rates: Mapping[str, float]) -> None:
        """Update ``flat.data`` with its present gradient, then the working copy; ``rates`` by role."""
        if not self._states:
            self._states = [self._fresh_state(span) for _, span in self._spans]
        for (role, span), state in zip(self._spans, self._states, strict=True):
            adamw_step(
                [self._flat.data[span]],
                [self._flat.grad[span]],
                {name: [tensor] for name, tensor in state.items()},
                lr=rates[role],
                betas=self._betas,
                weight_decay=self._weight_decay,
            )
        if self._group is not None:
            self._group.share_slices(self._flat.data, even_part(self._flat.size, self._group.world))
        self._flat.refresh()

    def state(self) -> dict[str, torch.Tensor]:
        """Moments ``[size]`` and step count ``[]`` on the CPU, for a checkpoint; independent of the number of ranks.

        Of a shared state only this rank's part is there; see :meth:`parts`.
        """
        moments = {name: torch.zeros(self._flat.size) for name in MOMENTS}
        for name, first, values in self.parts():
            if name in moments:
                moments[name][first : first + values.numel()] = values
        return moments | {"step": self._step()}

    def parts(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """The part of this rank: vector, first element, values on the CPU; the parts of all ranks are :meth:`state`.

        What all of them step is in each of them. As many parts on every rank, some of them empty.
        """
        yield "step", 0, self._step()
        parts = self._parked or self._parkable_moments()
        for (_, span), part in zip(self._spans if parts else (), parts, strict=True):
            yield from ((name, span.start, part[name].on_cpu()) for name in MOMENTS)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from :meth:`state` of all ranks.

        Raises:
            ValueError: the moments belong to a vector of another size.
        """
        if state["exp_avg"].numel() != self._flat.size:
            raise ValueError(f"moments of {state['exp_avg'].numel()} elements for a vector of {self._flat.size}")
        device = self._flat.data.device
        self._states = [
            {name: state[name][span].clone().to(device, torch.float32) for name in MOMENTS}
            | {"step": state["step"].clone().to(device, torch.float32)}
            for _, span in self._spans
        ]
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

    def _step(self) -> torch.Tensor:
        return self._states[0]["step"].detach().cpu().clone() if self._states else torch.zeros(())

    def _fresh_state(self, span: slice) -> dict[str, torch.Tensor]:
        part = self._flat.data[span]
        return {name: torch.zeros_like(part) for name in MOMENTS} | {"step": part.new_zeros(())}

    def _parkable_moments(self) -> list[dict[str, Parkable]]:
        return [{name: Parkable(state[name]) for name in MOMENTS} for state in self._states]

    def _parkables(self) -> list[Parkable]:
        return [parkable for part in self._parked for parkable in part.values()]


def adamw_step(
    values: list[torch.Tensor],
    gradients: list[torch.Tensor],
    state: Mapping[str, list[torch.Tensor]],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """One fused step, in place.

    Args:
        values: float32 parameters of any shapes.
        gradients: theirs.
        state: ``exp_avg``, ``exp_avg_sq`` and the steps made so far (``step``, ``[]`` each), one tensor a parameter.
        lr: learning rate.
        betas: decay rates of the moments.
        weight_decay: decoupled decay.
    """
    # the function under torch.optim.AdamW: the class imports torch's compiler, which takes longer than torch itself
    adamw(
        values,
        gradients,
        state["exp_avg"],
        state["exp_avg_sq"],
        [],
        state["step"],
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=EPS,
        maximize=False,
    )


def even_part(size: int, world: int) -> int:
    """Elements of a vector that each of ``world`` ranks has alone; what does not divide evenly belongs to all."""
    return size // (world * ALIGN) * ALIGN


def owned(size: int, rank: int, world: int) -> list[slice]:
    """What a rank steps: its slice, and the few elements at the end that all ranks step."""
    each = even_part(size, world)
    return [slice(rank * each, (rank + 1) * each), slice(world * each, size)]


def overlap(one: slice, other: slice) -> slice:
    """What two parts of a vector have in common, possibly nothing."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return slice(start, max(start, stop))


def clip_flat(gradient: torch.Tensor, max_norm: float) -> float:
    """Scale a flat gradient ``[size]`` in place to at most ``max_norm``; return its L2 norm before.

    A non-finite gradient is left as it is, and so is its norm: its update must be skipped.
    """
    norm = float(torch.linalg.vector_norm(gradient))
    if math.isfinite(norm) and norm > max_norm:
        gradient.mul_(max_norm / norm)
    return norm
