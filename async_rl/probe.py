"""What both halves of the doctor's probe share: weights of each version, rounds, faults that can be planted.

    actors.probe.main ──► FILE.npz ──► learner.probe.main ──► findings as JSON ──► doctor

Version 0 is the start model. Each later one has every tensor changed, reproducibly, so that both halves have the same
without sending them, and so that a tensor that was not delivered shows in the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch

FAULTS: Mapping[str, str] = {
    "temperature": "the engine ignores the temperature",
    "temperature-learner": "the learner ignores the temperature",
    "shift": "the engine's log-probabilities are shifted by one position",
    "shift-learner": "the learner's log-probabilities are shifted by one position",
    "version": "the engine's version stamps are one too high",
    "corrupt": "one tensor is corrupted on its way into the engine",
    "missing": "one tensor never gets into the engine",
}
"""What ``async-rl doctor CONFIG --plant NAME`` does, to show that the probe finds it."""

START, OTHER, DELIVERED, IN_FLIGHT = range(4)
"""Rounds: start weights; start weights at another temperature; version 1; two versions, one loaded in flight."""

LIMITS: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 1e-1}
"""Mean |log-probability of one side − of the other| that is noise; more makes every ratio wrong from the first step."""
SHARES: Mapping[str, float] = {"float32": 3e-4, "bfloat16": 0.25}
"""The same for changed weights, as a share of what the change does: such a model is chaotic and amplifies rounding."""
_PERIOD = 4093
"""Length of the noise pattern that is repeated over a tensor; a prime, so that it fits no row."""


def limit_at(dtype: str, temperature: float) -> float:
    """The limit at a temperature: rounding of the logits counts for more where they are divided by less than 1."""
    return LIMITS[dtype] / min(temperature, 1.0)


def other_temperature(temperature: float) -> float:
    """A second temperature for the probe: at 1 alone a temperature that is ignored would not show."""
    return 0.7 * temperature


def changed(tensor: torch.Tensor, name: str, version: int) -> torch.Tensor:
    """The tensor as version ``version`` has it: rolled, and every element moved by about a third of its size.

    Args:
        tensor: of the start model, on any device.
        name: of the tensor; each gets its own numbers.
        version: 0 changes nothing.
    """
    import torch

    if version == 0:
        return tensor
    seed = xxhash.xxh3_64_intdigest(f"{version}/{name}".encode()) & 0x7FFF_FFFF
    noise = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(seed)).to(tensor.device)
    flat = tensor.detach().float().flatten()
    pattern = noise.repeat(-(-flat.numel() // _PERIOD))[: flat.numel()]
    scale = flat.abs().mean()
    rolled = flat.roll(seed % max(flat.numel(), 1))
    moved = rolled * (1 + 0.3 * pattern) if scale > 0 else 0.3 * pattern
    return moved.to(tensor.dtype).view(tensor.shape)
