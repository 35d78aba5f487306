"""Any gymnasium environment with few actions, played in text: the observation as a line, the action as its number.

    env.reset ─► text ─► model ─► "2" ─► env.step(2) ─► text, reward, done

A state that is a cell of a grid with a map (FrozenLake) is shown as the map with the agent on it, anything else as
gymnasium gives it. gymnasium is imported on use only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.environments.base import Turn
from async_rl.tasks.frozenlake import picture


class GymnasiumText:
    """One episode of ``gymnasium.make(name, **columns["make"])``.

    Args:
        name: of a registered environment.

    Raises:
        ValueError: its actions are not numbers from 0.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._env: Any = None

    async def reset(self, columns: Mapping[str, Any], seed: int) -> str:
        """Make the environment and reset it, with the problem's own ``seed`` if it has one."""
        self._env = make(self._name, columns.get("make", {}))
        observation, _ = self._env.reset(seed=int(columns.get("seed", seed)))
        return self._describe(observation)

    async def act(self, text: str) -> Turn:
        """Take the action that the text names; anything else changes nothing and is told what there is."""
        text, count = text.strip(), int(self._env.action_space.n)
        if not (text.isascii() and text.isdigit() and len(text) <= 4 and int(text) < count):
            return Turn(f"actions: 0-{count - 1}", 0.0, done=False)
        observation, reward, terminated, truncated, _ = self._env.step(int(text))
        return Turn(self._describe(observation), float(reward), done=bool(terminated or truncated))

    async def close(self) -> None:
        """Close the environment, if it was made."""
        if self._env is not None:
            self._env.close()

    def _describe(self, observation: Any) -> str:
        desc = getattr(self._env.unwrapped, "desc", None)
        if desc is None or getattr(self._env.observation_space, "n", None) != desc.size:
            return str(observation)
        return picture(["".join(cell.decode() for cell in row) for row in desc], int(observation))


def make(name: str, arguments: Mapping[str, Any]) -> Any:
    """``gymnasium.make`` with a check that its actions can be written as numbers.

    Raises:
        ValueError: they are not ``Discrete`` from 0.
    """
    import gymnasium

    env = gymnasium.make(name, **arguments)
    space = env.action_space
    if not isinstance(space, gymnasium.spaces.Discrete) or space.start != 0:
        env.close()
        raise ValueError(f"{name} has the actions {space}; an action in text must be a number from 0 (Discrete)")
    return env
