"""A gymnasium vector environment behind :class:`~actors.control.environments.base.Environment`.

    NEXT_STEP  step t ends an episode and returns its last observation; step t + 1 only resets     ─► ``resets_next``
    SAME_STEP  step t ends it, resets, and tells the last observation in ``info["final_obs"]``

Both give the same Step otherwise: what followed a truncated step is known, terminated wins over truncated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from actors.control.environments.base import Observations, Step
from actors.control.environments.groups import check_alike
from actors.control.environments.gymnasium_spaces import action_of, observation_groups
from actors.control.environments.seeds import batch_seed, environment_seeds, process_seed
from async_rl.control.spaces import Spaces
from async_rl.errors import ConfigError


class GymnasiumEnvironment:
    """Adapter of one vector environment.

    Args:
        env: whose ``metadata`` says when it resets.
        name: of this process, which its seeds depend on.
        device: where observations, rewards and flags go.
        max_episode_steps: if it is known.

    Raises:
        ConfigError: a space or an autoreset mode that is not supported.
    """

    can_reset = True

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        name: str,
        device: torch.device | str = "cpu",
        max_episode_steps: int | None = None,
    ) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise ConfigError(
                f"env.id: {env} says autoreset_mode = {mode!r} in its metadata; actors need an environment that starts "
                "anew by itself: AutoresetMode.NEXT_STEP or SAME_STEP"
            )
        self._env, self._name = env, name
        self._resets_next = mode is AutoresetMode.NEXT_STEP
        observations, self._readers = observation_groups(env.single_observation_space)
        action, self._write = action_of(env.single_action_space)
        self._space = env.single_observation_space
        self.num_envs = env.num_envs
        self.device = torch.device(device)
        self.spaces = Spaces(observations=observations, action=action, max_episode_steps=max_episode_steps)
        self._nothing = {
            group: torch.zeros((0, *space.shape), dtype=getattr(torch, space.dtype), device=self.device)
            for group, space in observations.items()
        }

    def reset(self, seed: int) -> Observations:
        """Start every environment anew; equal seeds give other starts under another name."""
        own = process_seed(seed, self._name)
        each = isinstance(self._env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        seeds: Any = environment_seeds(own, self.num_envs) if each else batch_seed(own)
        observations, _ = self._env.reset(seed=seeds)
        return self._read(observations)

    def reset_alike(self, seed: int) -> Observations:
        """Start all of them in the same state, under any name.

        Raises:
            ConfigError: it takes no seed for each environment, or their first observations differ.
        """
        seeds: Any = [batch_seed(seed)] * self.num_envs
        try:
            observations, _ = self._env.reset(seed=seeds)
        except Exception as error:  # the environment is foreign code, and what it makes of a list is its own affair
            raise ConfigError(
                f"env.id: {self._env} cannot start its environments alike, which algorithm.name = 'grpo' needs "
                f"(reset takes no list of seeds: {error!r}); set env.vectorization = 'sync'"
            ) from error
        read = self._read(observations)
        check_alike(read, str(self._env))
        return read

    def step(self, actions: torch.Tensor) -> Step:
        """Apply actions [N, A]."""
        taken = actions if actions.device.type == "cpu" else actions.cpu()
        seen, rewards, terminated, truncated, info = self._env.step(self._write(taken.numpy()))
        rewards, terminated = np.asarray(rewards, np.float32), np.asarray(terminated)
        truncated = np.greater(truncated, terminated)  # and not terminated
        observations = self._read(seen)
        cut = truncated.any()
        flags = self._place(torch.from_numpy(truncated))
        if not cut:
            final: Observations = self._nothing
        elif self._resets_next:
            final = {name: values[flags] for name, values in observations.items()}
        elif "final_obs" in info:
            final = self._read(_rows(info["final_obs"], truncated.nonzero()[0]))
        else:
            raise ConfigError(
                f"env.id: {self._env} resets in the same step and does not tell the last observation; it must put it "
                "into info['final_obs'], or reset in the next step"
            )
        return Step(
            observations=observations,
            rewards=self._place(torch.from_numpy(rewards)),
            terminated=self._place(torch.from_numpy(terminated)),
            truncated=flags,
            final_observations=final,
            resets_next=self._place(torch.from_numpy(terminated | truncated)) if self._resets_next else None,
        )

    def render(self) -> npt.NDArray[np.uint8] | None:
        """Picture of the first environment; None: it was not made with ``render_mode = "rgb_array"``.

        Raises:
            ConfigError: it needs a package to draw.
        """
        if self._env.render_mode != "rgb_array":
            return None
        try:
            pictures = self._env.render()
        except DependencyNotInstalled as error:
            raise ConfigError(f"{self._env} cannot be drawn: {error}") from None
        return None if pictures is None else np.asarray(pictures[0], np.uint8)

    def close(self) -> None:
        """Close it and end its processes."""
        self._env.close()

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    def _read(self, observations: Any) -> dict[str, torch.Tensor]:
        if not isinstance(observations, dict):
            observations = dict.fromkeys(self._readers, observations)
        return {name: self._place(read(observations[name])) for name, read in self._readers.items()}


def _rows(final: Any, rows: npt.NDArray[np.intp]) -> Any:
    """Some rows of ``final_obs``: an object array with an observation each, or batched arrays."""
    if isinstance(final, dict):
        return {name: values[rows] for name, values in final.items()}
    if final.dtype != object:
        return final[rows]
    told = final[rows]
    if isinstance(told[0], dict):
        return {name: np.stack([one[name] for one in told]) for name in told[0]}
    return np.stack(list(told))
