"""Transitions of an expert from a safetensors file, checked; scripts/record_expert.py writes such files."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from async_rl.errors import ConfigError
from async_rl.shipped import find_shipped


@dataclass(frozen=True, slots=True)
class Expert:
    """M transitions of the behaviour that is to be imitated."""

    states: torch.Tensor
    """float32 [M, D]"""
    next_states: torch.Tensor
    """float32 [M, D]"""

    def __len__(self) -> int:
        return len(self.states)


def load_expert(name: str, width: int, device: torch.device) -> Expert:
    """Read and check a file of expert transitions.

    Args:
        name: path of the file, or the name of one that ships with the presets.
        width: D, of the discriminator's observation groups.
        device: where they go.

    Raises:
        ConfigError: there is no such file, or it holds something else than ``states`` and ``next_states`` [M, D] of
            finite float32 numbers.
    """
    path = find_shipped(name)
    if path is None:
        raise ConfigError(f"amp.expert = {name!r}: there is no such file; record one with scripts/record_expert.py")
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"amp.expert = {name!r} cannot be read as safetensors: {error}") from None
    missing = [key for key in ("states", "next_states") if key not in arrays]
    if missing:
        raise ConfigError(
            f"amp.expert = {name!r} lacks {' and '.join(missing)} (it has {', '.join(sorted(arrays)) or 'nothing'}); "
            "record it with scripts/record_expert.py"
        )
    states, next_states = arrays["states"], arrays["next_states"]
    for key, array in (("states", states), ("next_states", next_states)):
        if array.dtype != torch.float32 or array.ndim != 2 or array.shape[1] != width or len(array) == 0:
            kind = str(array.dtype).removeprefix("torch.")
            raise ConfigError(
                f"amp.expert = {name!r}: {key} is {kind} {list(array.shape)}, and the groups of "
                f"observations.discriminator need float32 [M, {width}] with M > 0"
            )
        if not torch.isfinite(array).all():
            raise ConfigError(f"amp.expert = {name!r}: {key} has numbers that are not finite; record it again")
    if len(states) != len(next_states):
        raise ConfigError(
            f"amp.expert = {name!r} has {len(states)} states and {len(next_states)} next_states; they must be pairs"
        )
    return Expert(states.to(device), next_states.to(device))
