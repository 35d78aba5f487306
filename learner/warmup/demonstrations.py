"""What an expert would write in the environments that ship: texts to supervise the tiny model of their presets with.

problem ─► demonstration: prompt ┃ model's turn ┃ observation ┃ model's turn ┃ ...       model's turns are trained
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from async_rl.tasks import Problem
from async_rl.tasks.frozenlake import distances, neighbour, picture
from async_rl.tasks.guess import SPAN, hint

_ACTIONS = (1, 2, 0, 3)
"""Of equally good moves the first in this order is taken: down, right, left, up."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One solved episode."""

    prompt: str
    turns: tuple[str, ...]
    """What the model writes."""
    observations: tuple[str, ...]
    """What it reads after each turn but the last."""


def calculator(problem: Problem) -> Demonstration:
    """Have the whole expression computed, then repeat the result."""
    answer = str(problem.columns["answer"])
    return Demonstration(problem.prompt, (f"[{problem.prompt.removesuffix('=')}]", answer), (answer,))


def guess(problem: Problem) -> Demonstration:
    """Halve the range until the number is found."""
    secret, low = int(problem.columns["secret"]), int(problem.columns["low"])
    high = low + SPAN - 1
    turns: list[str] = []
    hints: list[str] = []
    while True:
        middle = (low + high) // 2
        turns.append(str(middle))
        if middle == secret:
            return Demonstration(problem.prompt, tuple(turns), tuple(hints))
        hints.append(hint(turns[-1], secret))
        low, high = (middle + 1, high) if middle < secret else (low, middle - 1)


def frozenlake(problem: Problem) -> Demonstration:
    """Go a shortest way to the goal."""
    desc = problem.columns["make"]["desc"]
    left, width = distances(desc), len(desc[0])
    cell = 0
    turns: list[str] = []
    pictures: list[str] = []
    while left[cell]:
        if turns:
            pictures.append(picture(desc, cell))
        around = [(action, neighbour(cell, action, len(desc), width)) for action in _ACTIONS]
        action, cell = next((a, c) for a, c in around if left[c] == (left[cell] or 0) - 1)
        turns.append(str(action))
    return Demonstration(problem.prompt, tuple(turns), tuple(pictures))


EXPERTS: Mapping[str, Callable[[Problem], Demonstration]] = {
    "calculator": calculator,
    "guess": guess,
    "gymnasium:FrozenLake-v1": frozenlake,
}
"""By ``task.environment``."""
