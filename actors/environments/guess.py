"""Number guessing: the model names a number and is told whether the secret one is higher or lower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.environments.base import Turn
from async_rl.tasks.guess import hint


class Guess:
    """One secret number: reward 1 for finding it within ``task.max_turns``, however many of them it took.

    Less reward for later hits would teach nothing more: halving the range finds every number in time, and an early hit
    is luck.
    """

    def __init__(self) -> None:
        self._secret = 0

    async def reset(self, columns: Mapping[str, Any], seed: int) -> str:
        """The range; the secret is in the problem."""
        self._secret = int(columns["secret"])
        return str(columns["prompt"])

    async def act(self, text: str) -> Turn:
        """Compare."""
        reply = hint(text, self._secret)
        return Turn(reply, float(not reply), done=not reply)

    async def close(self) -> None:
        """Nothing is held."""
