"""What a multi-turn environment offers: reset, then act until it is done. User code, run in killable child processes.

    reset(columns, seed) ─► first observation ─► model ─► act(text) ─► Turn(observation, reward, done) ─► model ─► ...

The return of an episode is the sum of its turns' rewards; one of 1 or more counts as solved
(:func:`async_rl.data.is_correct`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Turn:
    """What the environment makes of one answer of the model."""

    observation: str
    """What the model reads next; not used after the end."""
    reward: float
    """Finite; the rewards of an episode are summed."""
    done: bool
    """Whether the episode has ended. It also ends after ``task.max_turns`` answers, and when the context is full."""


class Environment(Protocol):
    """One episode at a time. Each child process makes as many as it has episodes and awaits them in one event loop.

    A class of yours (``task.environment = "module:Class"``) is made without arguments, once for each episode. Unless
    ``task.data`` brings the problems, it has a static method ``problems()`` that yields ``(key, Problem)``: the same
    ones in every process; problems of one key are never split between training and evaluation.

    ``reset`` and ``act`` may await (a tool, a server). What blocks instead holds up all episodes of its process, and at
    ``task.timeout_s`` the process is killed. An episode that is not needed any longer is cancelled at its next await.
    """

    async def reset(self, columns: Mapping[str, Any], seed: int) -> str:
        """Begin; the first observation, which is the prompt.

        All samples of a group are reset with the same arguments and must give the same observation.

        Args:
            columns: of the problem, its ``prompt`` among them.
            seed: for what is random in the episode.
        """

    async def act(self, text: str) -> Turn:
        """Take the model's answer, without its end token."""

    async def close(self) -> None:
        """Free what the episode held; called once, at its end, whatever that was."""
