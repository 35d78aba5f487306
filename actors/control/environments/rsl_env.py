"""An object with rsl_rl's ``VecEnv`` interface (Isaac Lab's wrapper, our worlds) behind ``Environment``.

    step ─► observations, rewards, dones, extras ─► truncated = dones & extras["time_outs"], terminated = other dones

A finished environment is reset in the same step and what it saw last is lost: ``final_observations`` is None.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from actors.control.environments.base import Observations, Step
from actors.control.environments.groups import LONE, check_alike
from actors.control.environments.seeds import batch_seed, process_seed
from async_rl.control.spaces import Action, Observation, Spaces
from async_rl.errors import ConfigError

_DTYPES = {torch.uint8: torch.uint8, torch.int32: torch.int32, torch.int64: torch.int32, torch.int16: torch.int32}
"""Of a group -> of the tensors that we pass on; all others become float32."""


def is_vec_env(made: object) -> bool:
    """Whether it has what rsl_rl needs."""
    return all(hasattr(made, name) for name in ("get_observations", "step", "num_envs", "num_actions"))


class RslEnvironment:
    """Adapter of one ``VecEnv``.

    Beyond rsl_rl's interface it looks for ``action_choices`` (numbers of choices of discrete actions),
    ``reset(seed=...)`` or ``seed(...)`` and ``reset()``, ``reset_alike(seed)``, ``render()`` and ``close()``, and does
    without what is missing.

    Args:
        env: the object.
        name: of this process, which its seeds depend on.

    Raises:
        ConfigError: its observations are no tensors [num_envs, ...].
    """

    def __init__(self, env: Any, name: str) -> None:
        self._env, self._name, self._what = env, name, type(env).__name__
        self.num_envs = int(env.num_envs)
        self.can_reset = callable(getattr(env, "reset", None))
        first = _groups(env.get_observations())
        for group, values in first.items():
            if not isinstance(values, torch.Tensor) or values.ndim < 2 or len(values) != self.num_envs:
                found = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
                raise ConfigError(
                    f"env.id: observation group {group!r} of {self._what} is {found}; expected a tensor "
                    f"[{self.num_envs}, ...], one row per environment"
                )
        self._dtypes = {group: _DTYPES.get(values.dtype, torch.float32) for group, values in first.items()}
        self.device = next(iter(first.values())).device
        self.spaces = Spaces(
            observations={
                group: Observation(tuple(values.shape[1:]), str(self._dtypes[group]).removeprefix("torch."))  # type: ignore[arg-type]
                for group, values in first.items()
            },
            action=_action(env),
            max_episode_steps=_limit(getattr(env, "max_episode_length", None)),
        )
        self._never = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    def reset(self, seed: int) -> Observations:
        """Start anew as far as the object can: equal seeds give other starts under another name."""
        own = batch_seed(process_seed(seed, self._name))
        reset = getattr(self._env, "reset", None)
        if reset is not None and "seed" in inspect.signature(reset).parameters:
            reset(seed=own)
        else:
            if callable(getattr(self._env, "seed", None)):
                self._env.seed(own)
            if reset is not None:
                reset()
        return self._read(self._env.get_observations())

    def reset_alike(self, seed: int) -> Observations:
        """Start all of them in the same state, under any name.

        Raises:
            ConfigError: the object has no method ``reset_alike``, or their first observations differ.
        """
        if not hasattr(self._env, "reset_alike"):
            raise ConfigError(
                f"env.id: {self._what} cannot start its environments alike, which algorithm.name = 'grpo' needs; give "
                "it a method reset_alike(seed) after which all environments are in the same state"
            )
        self._env.reset_alike(batch_seed(seed))
        observations = self._read(self._env.get_observations())
        check_alike(observations, self._what)
        return observations

    def step(self, actions: torch.Tensor) -> Step:
        """Apply actions [N, A].

        Raises:
            ConfigError: flags that are not one for each environment, or observations of another kind than at first.
        """
        seen, rewards, dones, extras = self._env.step(
            actions if actions.device == self.device else actions.to(self.device)
        )
        dones = dones if dones.dtype == torch.bool else dones.bool()
        time_outs = extras.get("time_outs")
        for name, flags in (("dones", dones), ("time_outs", self._never if time_outs is None else time_outs)):
            if flags.shape != self._never.shape:  # together they would spread over all environments
                raise ConfigError(
                    f"env.id: {self._what} gives {name} {list(flags.shape)} in a step; expected [{self.num_envs}]"
                )
        truncated = self._never if time_outs is None else dones & time_outs.bool()
        return Step(
            observations=self._read(seen, extras),
            rewards=rewards if rewards.dtype == torch.float32 else rewards.float(),
            terminated=dones ^ truncated,
            truncated=truncated,
            final_observations=None,
            resets_next=None,
        )

    def render(self) -> npt.NDArray[np.uint8] | None:
        """Picture of the first environment, where the object draws one."""
        picture = self._env.render() if hasattr(self._env, "render") else None
        return picture if isinstance(picture, np.ndarray) and picture.ndim == 3 else None

    def close(self) -> None:
        """Close it, where it can be closed."""
        if hasattr(self._env, "close"):
            self._env.close()

    def _read(self, seen: Any, extras: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        groups = _groups(seen, extras)
        for group, dtype in self._dtypes.items():
            found = groups.get(group)
            if found is None:
                raise ConfigError(f"env.id: {self._what} gives no observation group {group!r} any more")
            if found.dtype != dtype and dtype != torch.float32 and _DTYPES.get(found.dtype) != dtype:
                raise ConfigError(  # a conversion would cut numbers off without a word
                    f"env.id: observation group {group!r} of {self._what} was {dtype} at first and is {found.dtype} now"
                )
        return {group: groups[group].to(dtype) for group, dtype in self._dtypes.items()}


def _groups(seen: Any, extras: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Observations by group: a dictionary or ``TensorDict``; in older interfaces a tensor, and the others in extras."""
    if isinstance(seen, tuple):
        seen, extras = seen
    if hasattr(seen, "items"):
        return dict(seen.items())
    others = (extras or {}).get("observations", {})
    return {LONE: seen, **{name: values for name, values in others.items() if name != LONE}}


def _action(env: Any) -> Action:
    choices = tuple(int(n) for n in getattr(env, "action_choices", ()))
    if choices:
        return Action(kind="discrete", size=len(choices), choices=choices)
    size = int(env.num_actions)
    return Action(kind="continuous", size=size, low=(-math.inf,) * size, high=(math.inf,) * size)


def _limit(length: Any) -> int | None:
    """Most steps of an episode; a tensor holds that of each environment."""
    if length is None:
        return None
    return int(length.max()) if isinstance(length, torch.Tensor) else int(length)
