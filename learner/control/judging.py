"""What a policy says about given actions, part by part, whether it decides the parts at once or one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from async_rl.control.networks import Actor
from async_rl.control.vla import ActionTokens

Inputs: TypeAlias = torch.Tensor | Mapping[str, torch.Tensor]
"""What a policy reads of S samples: [S, D], or by group [S, ...]; see ``Actor.observe``."""

_CHUNK = {"cpu": 512}
_CHUNK_OF_DEVICE = 16_384
"""Samples that are forwarded at once where no gradient is needed: activations that fit the cache, or the device."""


def judge(actor: Actor, x: Inputs, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [m, A] of the parts of actions, and entropies [m], summed over the parts.

    Args:
        actor: not recurrent.
        x: of m samples.
        actions: [m, A], float32 or int64.
    """
    distribution = actor.distribution(actor.features(x))  # type: ignore[arg-type]  # a transformer reads groups
    if isinstance(distribution, ActionTokens):
        return distribution.judge(actions)
    return distribution.log_prob_parts(actions), distribution.entropy()


@torch.no_grad()
def judge_all(actor: Actor, x: Inputs, actions: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [S, A] of a whole step's samples, without gradients, some at a time."""
    size = _CHUNK.get(actions.device.type, _CHUNK_OF_DEVICE)
    chunks = torch.arange(len(actions), device=actions.device).split(size)
    return torch.cat([judge(actor, rows_of(x, rows), actions[rows])[0] for rows in chunks])


def rows_of(x: Inputs, index: torch.Tensor) -> Inputs:
    """Some of the samples."""
    return x[index] if isinstance(x, torch.Tensor) else {name: array[index] for name, array in x.items()}
