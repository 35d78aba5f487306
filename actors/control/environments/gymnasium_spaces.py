"""gymnasium's spaces as observation groups and actions, and the functions that convert arrays between the two.

    Box of reals             ─► float32 [N, D]            Box of uint8          ─► uint8 [N, *shape]
    Discrete, MultiDiscrete  ─► one-hot float32 [N, D]    Box of other integers ─► int32 [N, *shape]
    MultiBinary              ─► float32 [N, D]            Dict                  ─► a group per key

The functions are chosen once, by space, so that a step does only what it must.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces

from actors.control.environments.groups import LONE
from async_rl.control.spaces import Action, Observation
from async_rl.errors import ConfigError

Reader = Callable[[Any], torch.Tensor]
"""Batched array [N, ...] of one group -> tensor on the CPU, sharing memory where it can."""

Writer = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
"""Actions [N, A], float32 or int32 -> what the environment takes."""


def observation_groups(space: gymnasium.Space[Any]) -> tuple[dict[str, Observation], dict[str, Reader]]:
    """Groups of a single environment's observation space, and how to read each.

    Raises:
        ConfigError: a space that no group can hold; names it.
    """
    parts: Mapping[str, gymnasium.Space[Any]] = space.spaces if isinstance(space, spaces.Dict) else {LONE: space}
    read = {name: _reader(part, name) for name, part in parts.items()}
    return {name: found for name, (found, _) in read.items()}, {name: reader for name, (_, reader) in read.items()}


def action_of(space: gymnasium.Space[Any]) -> tuple[Action, Writer]:
    """A single environment's action space, and how to give it actions. Bounded ones are clipped to their bounds.

    Raises:
        ConfigError: a space that no policy here acts in; names it.
    """
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        with np.errstate(over="ignore"):  # bounds beyond float32 are none
            low, high = (np.asarray(bound, np.float32).reshape(-1) for bound in (space.low, space.high))
        action = Action(kind="continuous", size=low.size, low=tuple(low.tolist()), high=tuple(high.tolist()))
        bounded = bool(np.isfinite(low).any() or np.isfinite(high).any())
        return action, _continuous_writer(space, (low, high) if bounded else None)
    if isinstance(space, spaces.Discrete):
        start, dtype = space.start, space.dtype
        return (
            Action(kind="discrete", size=1, choices=(int(space.n),)),
            lambda actions: actions[:, 0].astype(dtype) + start,
        )
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        choices = _choices(space)
        first = np.asarray(getattr(space, "start", 0))
        shape, dtype = space.shape, space.dtype
        return (
            Action(kind="discrete", size=len(choices), choices=choices),
            lambda actions: actions.reshape(-1, *shape).astype(dtype) + first.astype(dtype),
        )
    raise ConfigError(
        f"env.id: the environment's action space is {space}; a policy acts in a Box of real numbers, Discrete, "
        "MultiDiscrete or MultiBinary. Wrap the environment"
    )


def _choices(space: spaces.MultiDiscrete | spaces.MultiBinary) -> tuple[int, ...]:
    counts = space.nvec if isinstance(space, spaces.MultiDiscrete) else np.full(space.shape, 2)
    return tuple(int(n) for n in np.asarray(counts).reshape(-1))


def _continuous_writer(space: spaces.Box, bounds: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None) -> Writer:
    shape, dtype, flat = space.shape, space.dtype, len(space.shape) == 1

    def write(actions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if bounds is not None:
            actions = np.minimum(np.maximum(actions, bounds[0]), bounds[1])
        return (actions if flat else actions.reshape(-1, *shape)).astype(dtype, copy=False)

    return write


def _reader(space: gymnasium.Space[Any], name: str) -> tuple[Observation, Reader]:
    if isinstance(space, spaces.Box):
        if space.dtype == np.uint8:
            return Observation(space.shape, "uint8"), lambda array: _tensor(array, np.uint8)
        if np.issubdtype(space.dtype, np.integer):
            return Observation(space.shape, "int32"), lambda array: _tensor(array, np.int32)
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        if len(space.shape) == 1:
            return Observation(space.shape), lambda array: _tensor(array, np.float32)
        return (
            Observation((int(np.prod(space.shape)),)),
            lambda array: _tensor(array, np.float32).reshape(len(array), -1),
        )
    if isinstance(space, spaces.Discrete):
        return _one_hot((int(space.n),), np.asarray(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return _one_hot(_choices(space), np.asarray(getattr(space, "start", 0)))
    raise ConfigError(
        f"env.id: observation group {name!r} is {space}; a group is a Box, Discrete, MultiDiscrete or MultiBinary. "
        "Wrap the environment"
    )


def _one_hot(choices: tuple[int, ...], start: npt.NDArray[Any]) -> tuple[Observation, Reader]:
    """One-hot vectors of each part behind one another."""
    offsets = torch.tensor([0, *choices[:-1]]).cumsum(0)
    width = sum(choices)

    def read(array: Any) -> torch.Tensor:
        values = np.asarray(array, np.int64) - start
        hot = torch.zeros(len(values), width)
        return hot.scatter_(1, torch.from_numpy(values.reshape(len(values), -1)) + offsets, 1.0)

    return Observation((width,)), read


def _tensor(array: Any, dtype: npt.DTypeLike) -> torch.Tensor:
    """Without a copy where dtype and ownership allow it."""
    array = np.asarray(array, dtype)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
