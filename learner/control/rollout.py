"""A rank's fragments of one step as tensors on its device, side by side along the environment axis.

groups [T, N1, ...] [T, N2, ...] ─► Rollout [T, N, ...]
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from async_rl.control.fragment import FINAL_OBS, HIDDEN, LAST_OBS, OBS
from async_rl.data import Array, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """T steps of N environments, see :mod:`async_rl.control.fragment` for the arrays."""

    obs: Mapping[str, torch.Tensor]
    """By group [T, N, ...], of the space's dtype."""
    last_obs: Mapping[str, torch.Tensor]
    """By group [N, ...]: what follows the last step."""
    final_obs: Mapping[str, torch.Tensor] | None
    """By group [K, ...]: what followed the truncated steps; None where a fragment does not tell, and where there
    are none."""
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
        """T."""
        return self.actions.shape[0]

    @property
    def num_envs(self) -> int:
        """N."""
        return self.actions.shape[1]


def stack_fragments(groups: Sequence[Group], device: torch.device) -> Rollout:
    """Put fragments side by side; one alone is not copied on the CPU.

    Args:
        groups: fragments of the same T, as the server checked them.
        device: of the learner.
    """
    fragments = [{name: _tensor(array) for name, array in group.arrays.items()} for group in groups]

    def beside(name: str, axis: int = 1) -> torch.Tensor:
        parts = [fragment[name] for fragment in fragments]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, axis)).to(device, non_blocking=True)

    terminated, truncated, versions = beside("terminated"), beside("truncated"), beside("versions")
    actions = beside("actions")
    acted = versions >= 0
    names = [name.removeprefix(OBS) for name in fragments[0] if name.startswith(OBS)]
    cut, told = _truncations(fragments)
    return Rollout(
        obs={name: beside(OBS + name) for name in names},
        last_obs={name: beside(LAST_OBS + name).squeeze(0) for name in names},
        final_obs={name: _rows(fragments, FINAL_OBS + name).to(device) for name in names} if told else None,
        final_index=(cut[:, 0].to(device), cut[:, 1].to(device)),
        actions=actions if actions.dtype == torch.float32 else actions.long(),
        logprobs=beside("logprobs"),
        versions=versions,
        rewards=beside("step_rewards"),
        terminated=terminated,
        truncated=truncated,
        acted=acted,
        resets=_resets(terminated | truncated | ~acted),
        states={n.removeprefix(HIDDEN): beside(n) for n in fragments[0] if n.startswith(HIDDEN)},
    )


def _tensor(array: Array) -> torch.Tensor:
    """The same memory as a tensor; nobody writes to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # arrays off the wire are read-only, which torch warns of
        return torch.from_numpy(array)


def _truncations(fragments: Sequence[Mapping[str, torch.Tensor]]) -> tuple[torch.Tensor, bool]:
    """Step and environment [K, 2] of the truncated steps, fragment by fragment, and whether all tell what followed."""
    found, offset, told = [], 0, True
    for fragment in fragments:
        index = fragment["truncated"].nonzero()
        told = told and (not len(index) or any(name.startswith(FINAL_OBS) for name in fragment))
        found.append(index + torch.tensor([0, offset]))
        offset += fragment["truncated"].shape[1]
    cut = torch.cat(found)
    return cut, told and len(cut) > 0


def _rows(fragments: Sequence[Mapping[str, torch.Tensor]], name: str) -> torch.Tensor:
    """Rows of the fragments that have some."""
    return torch.cat([fragment[name] for fragment in fragments if name in fragment])


def _resets(last: torch.Tensor) -> torch.Tensor:
    """Where an episode begins, given the steps [T, N] that are the last before a beginning."""
    resets = torch.zeros_like(last)
    resets[1:] = last[:-1]
    return resets
