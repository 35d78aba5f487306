"""Which state follows each step of a rollout, as far as the fragments tell; what RND and AMP reward.

obs[t+1] (last_obs behind the last row) ─┐
final_obs of truncated steps ────────────┴─► next [T, N, D], known [T, N]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from learner.control.rollout import Rollout


@dataclass(frozen=True, slots=True)
class Transitions:
    """Steps of a rollout as pairs of states."""

    states: torch.Tensor
    """float32 [T, N, D]: before the step."""
    next_states: torch.Tensor
    """float32 [T, N, D]: after it; where an episode ended and nothing else is known, the first of the next one."""
    known: torch.Tensor
    """bool [T, N]: an action counted, and ``next_states`` is what it led to."""


def join_groups(obs: Mapping[str, torch.Tensor], groups: tuple[str, ...]) -> torch.Tensor:
    """Flat observation groups side by side, float32 [.., D]."""
    parts = [obs[group].float() for group in groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def transitions_of(rollout: Rollout, groups: tuple[str, ...]) -> Transitions:
    """Pair each step's state with the next one.

    The row behind an episode's last step holds that episode's final observation if the environment resets in the
    *next* step (then no action counted in that row), else already the new episode's first one.

    Args:
        rollout: this rank's data.
        groups: observation groups of a state, all flat.
    """
    states = join_groups(rollout.obs, groups)
    next_states = torch.cat([states[1:], join_groups(rollout.last_obs, groups)[None]])
    done = rollout.terminated | rollout.truncated
    known = ~done
    known[:-1] |= ~rollout.acted[1:]
    if rollout.final_obs is not None:
        next_states[rollout.final_index] = join_groups(rollout.final_obs, groups)
        known[rollout.final_index] = True
    return Transitions(states, next_states, known & rollout.acted)
