"""A calculator as a tool: ``[12+34]`` is answered by ``46``; anything that is not in brackets is the final answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.environments.base import Turn
from async_rl.tasks.calculator import compute


class Calculator:
    """One problem ``12+34*56=``: any number of calls, then an answer; reward 1 if that is right, else 0."""

    def __init__(self) -> None:
        self._answer = ""

    async def reset(self, columns: Mapping[str, Any], seed: int) -> str:
        """The problem; nothing is random."""
        self._answer = str(columns["answer"])
        return str(columns["prompt"])

    async def act(self, text: str) -> Turn:
        """Compute what is in brackets, or judge the answer."""
        text = text.strip()
        if text.startswith("[") and text.endswith("]"):
            return Turn(compute(text[1:-1]), 0.0, done=False)
        return Turn("", float(text == self._answer), done=True)

    async def close(self) -> None:
        """Nothing is held."""
