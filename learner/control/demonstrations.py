"""A first policy from demonstrations, before there is any reward: supervised learning on what a script or a person did.

    episodes.demonstrations ─► f(count, seed, **env.kwargs) ─► observations, actions ─► maximum likelihood ─► policy

Groups of episodes teach nothing as long as all of a group fail. So a vision-language-action policy is fine-tuned on
demonstrations first and improved by reinforcement learning then (Li et al. 2025, arXiv:2509.09674).
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from async_rl.config import ControlConfig
from async_rl.control.fragment import OBS
from async_rl.control.networks import Actor
from async_rl.control.normalizer import Normalizer
from async_rl.control.spaces import Spaces
from async_rl.errors import ConfigError
from learner.control.judging import judge, rows_of

BATCH = 256
"""Demonstrated steps of an update; none is seen twice."""
_LR = 2e-3
_MAX_NORM = 1.0
_WINDOW = 8
"""Updates that the loss is averaged over."""

Demonstrate = Callable[..., Mapping[str, npt.NDArray[Any]]]
"""``f(count, seed, **env.kwargs)``: ``obs/GROUP`` [count, ...] for the groups that the actor reads, and ``actions``
[count, A], of the spaces' dtypes."""


def imitate(actor: Actor, config: ControlConfig, spaces: Spaces) -> None:
    """Train a policy to do what was demonstrated, with an optimiser of its own.

    Args:
        actor: as it was initialised; not recurrent.
        config: ``episodes.demonstrations`` says whose, ``demonstration_updates`` and
            ``demonstration_loss`` how long.
        spaces: of the environment.

    Raises:
        ConfigError: the function cannot be imported, or gives something else than asked for.
    """
    settings = config.episodes
    count = settings.demonstration_updates * BATCH
    shown = _demonstrate(config, spaces, count)
    device = next(actor.parameters()).device
    tensors = {name: torch.from_numpy(array).to(device) for name, array in shown.items()}
    x = actor.observe({name: tensors[OBS + name] for name in actor.groups})
    if isinstance(actor.normalizer, Normalizer):  # before, or the first step's statistics would undo what was learned
        actor.normalizer.update(actor.normalizer.moments(x))
    actions = tensors["actions"] if spaces.action.kind == "continuous" else tensors["actions"].long()
    optimizer = torch.optim.AdamW(actor.parameters(), lr=_LR, weight_decay=0.0)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(config.seed)).to(device)
    losses: deque[float] = deque(maxlen=_WINDOW)
    for rows in order.split(BATCH):
        logprobs, _ = judge(actor, rows_of(x, rows), actions[rows])
        loss = -logprobs.sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(actor.parameters(), _MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == _WINDOW and sum(losses) / _WINDOW < settings.demonstration_loss:
            break
    optimizer.zero_grad()


def _demonstrate(config: ControlConfig, spaces: Spaces, count: int) -> dict[str, npt.NDArray[Any]]:
    """The demonstrated steps, checked."""
    name = config.episodes.demonstrations
    shown = _load(name)(count, config.seed, **config.env.kwargs)
    action = "float32" if spaces.action.kind == "continuous" else "int32"
    expected: dict[str, tuple[tuple[int, ...], str]] = {"actions": ((count, spaces.action.size), action)}
    for group in config.groups_of("actor"):
        space = spaces.observations[group]
        expected[OBS + group] = ((count, *space.shape), space.dtype)
    for array, (shape, dtype) in expected.items():
        found = shown.get(array)
        if not isinstance(found, np.ndarray) or found.shape != shape or found.dtype != dtype:
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
            raise ConfigError(
                f"episodes.demonstrations = {name!r} gave {what} as {array!r}, expected {dtype} {list(shape)}"
            )
    return {array: shown[array] for array in expected}


def _load(name: str) -> Demonstrate:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"episodes.demonstrations = {name!r} cannot be imported: {error}") from None
    if not callable(found):
        raise ConfigError(f"episodes.demonstrations = {name!r} is no function")
    return found
