"""What the collector asks of N environments that step together, whoever made them.

    reset(seed) ─► observations ─► policy ─► step(actions) ─► Step ─► ...

Adapters hide the differences: gymnasium's ways to reset a finished environment, rsl_rl's ``VecEnv``, numpy or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from async_rl.control.spaces import Spaces

Observations = Mapping[str, torch.Tensor]
"""By group: [N, ...] of the space's dtype, on the environment's device. The collector copies what it keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step of all environments gave."""

    observations: Observations
    """What the policy sees next; of an environment that was reset in this step, the new episode's first."""
    rewards: torch.Tensor
    """float32 [N]"""
    terminated: torch.Tensor
    """bool [N]: the episode ended in a state without a future."""
    truncated: torch.Tensor
    """bool [N]: it was cut off; never where ``terminated``."""
    final_observations: Observations | None
    """What followed the truncated steps, rows [K, ...] in the order of ``truncated.nonzero()``; None: the environment
    does not tell, and the value before the step stands in for it, as in rsl_rl."""
    resets_next: torch.Tensor | None
    """bool [N]: the next step of these only resets them: their action does not count (gymnasium's ``next_step``)."""


class Environment(Protocol):
    """N environments. Calls come from one thread."""

    num_envs: int
    spaces: Spaces
    device: torch.device
    """Of observations, rewards and flags."""
    can_reset: bool
    """Whether :meth:`reset` begins anew; else it only looks where the environments stand."""

    def reset(self, seed: int) -> Observations:
        """Start every environment anew, each with a seed of its own that follows from ``seed``."""

    def reset_alike(self, seed: int) -> Observations:
        """Start all of them in the *same* initial state, which follows from ``seed`` (``grpo``).

        Raises:
            ConfigError: the environment cannot be seeded.
        """

    def step(self, actions: torch.Tensor) -> Step:
        """Apply actions [N, A], float32 (clipped to the bounds here) or int32."""

    def render(self) -> npt.NDArray[np.uint8] | None:
        """Picture [H, W, 3] of the first environment; None: it has none."""

    def close(self) -> None:
        """Free what it holds, processes included."""
