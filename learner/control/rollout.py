"""A rank's fragments of one step as tensors on its device, side by side along the environment axis.

groups [T, N1, ...] [T, N2, ...] ─► Rollout [T, N, ...]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from async_rl.data import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """T steps of N environments, see :mod:`async_rl.control.fragment` for the arrays."""

    obs: Mapping[str, torch.Tensor]
    """By group [T, N, ...], of the space's dtype."""
    last_obs: Mapping[str, torch.Tensor]
    """By group [N, ...]: what follows the last step."""
    final_obs: Mapping[str, torch.Tensor] | None
    """By group [K, ...]: what followed the truncated steps; None where a fragment does not tell."""
    final_index: tuple[torch.Tensor, torch.Tensor]
    """int64 [K] each: step and environment of the rows of ``final_obs``."""
    actions: torch.Tensor
    """[T, N, A], float32 or int64."""
    logprobs: torch.Tensor
    """[T, N]: of the behaviour policy."""
    versions: torch.Tensor
    """int32 [T, N]"""
    rewards: torch.Tensor
    """float32 [T, N]: of the environment."""
    terminated: torch.Tensor
    """bool [T, N]"""
    truncated: torch.Tensor
    """bool [T, N]"""
    acted: torch.Tensor
    """bool [T, N]: where an action counted; nothing else is trained."""
    resets: torch.Tensor
    """bool [T, N]: a new episode begins with this step (its hidden state is 0): the one before was its end, or a reset
    step. False in the first row, whose ``states`` are right already."""
    states: Mapping[str, torch.Tensor]
    """Recurrent, by name [L, N, H]: before the first step."""

    @property
    def num_steps(self) -> int:
        """T"""
        return self.actions.shape[0]

    @property
    def num_envs(self) -> int:
        """N"""
        return self.actions.shape[1]


def stack_fragments(groups: Sequence[Group], device: torch.device) -> Rollout:
    """Put fragments side by side; one alone is not copied on the CPU.

    Args:
        groups: fragments of the same T, as the server checked them.
        device: of the learner.
    """
    raise NotImplementedError(groups, device)
