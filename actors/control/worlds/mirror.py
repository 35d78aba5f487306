"""Mirror images of the worlds, left for right, for ``symmetry.function``.

Each function takes observations by group [B, ...] and actions [B, A], either of which may be None, and gives
[2 B, ...]: the originals first and their mirror images behind them. Mirrored states under mirrored actions stay mirror
images.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

Groups = Mapping[str, torch.Tensor] | None
Mirrored = tuple[dict[str, torch.Tensor] | None, torch.Tensor | None]


def cartpole(observations: Groups, actions: torch.Tensor | None) -> Mirrored:
    """``BatchedCartPole``, ``PrivilegedCartPole`` and gymnasium's CartPole-v1: all numbers change their sign."""
    return _mirror(observations, actions, ())


def swing_up(observations: Groups, actions: torch.Tensor | None) -> Mirrored:
    """``SparseSwingUp``: all but the cosine change their sign."""
    return _mirror(observations, actions, (2,))


def pendulum(observations: Groups, actions: torch.Tensor | None) -> Mirrored:
    """``BatchedPendulum`` and gymnasium's Pendulum-v1: all but the cosine change their sign."""
    return _mirror(observations, actions, (0,))


def _mirror(observations: Groups, actions: torch.Tensor | None, kept: tuple[int, ...]) -> Mirrored:
    """Change signs, but of the columns ``kept``; of two discrete choices take the other."""
    both = None
    if observations is not None:
        both = {name: torch.cat((values, _flip(values, kept))) for name, values in observations.items()}
    if actions is None:
        return both, None
    other = -actions if actions.is_floating_point() else 1 - actions
    return both, torch.cat((actions, other))


def _flip(values: torch.Tensor, kept: tuple[int, ...]) -> torch.Tensor:
    image = -values
    for column in kept:
        image[..., column] = values[..., column]
    return image
