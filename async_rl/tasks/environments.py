"""The problems of an environment. The environments themselves run on actor hosts, see ``actors.environments``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from async_rl.errors import ConfigError
from async_rl.tasks import calculator, frozenlake, guess
from async_rl.tasks.listing import list_problems
from async_rl.tasks.problem import Problem

BUILT_IN = ("calculator", "guess")
GYMNASIUM = "gymnasium:"
_FROZEN_LAKE = "gymnasium:FrozenLake-v1"
_SEEDS = 2_500
"""Problems of a gymnasium environment that has only seeds to tell one from another."""


def environment_problems(
    environment: str, digits: int, env: Mapping[str, str] | None = None
) -> Iterator[tuple[object, Problem]]:
    """The problems that ``task.environment`` brings, as ``(key, problem)``; the same ones in every process.

    Args:
        environment: ``calculator``, ``guess``, ``gymnasium:ID`` or ``module:Class``, whose ``problems()`` is called.
        digits: of each operand (``calculator``).
        env: environment of the process that lists a user's problems; None: this one's, with its search path.

    Raises:
        ConfigError: there is no such environment, or its problems are not of this form.
    """
    if is_class(environment):
        return iter(list_problems(environment, env))
    if environment == "calculator":
        return calculator.problems(digits)
    if environment == "guess":
        return guess.problems()
    if environment == _FROZEN_LAKE:
        return frozenlake.problems()
    name = environment.removeprefix(GYMNASIUM)
    return iter([(i, Problem(prompt=f"{name} {i}", columns={"seed": i})) for i in range(_SEEDS)])


def is_class(environment: str) -> bool:
    """Whether it names a user's class, whose problems only that class knows.

    Raises:
        ConfigError: there is no such environment; names the nearest.
    """
    if environment in BUILT_IN or environment.startswith(GYMNASIUM):
        return False
    if not re.fullmatch(r"[\w.]+:\w+", environment):
        near = difflib.get_close_matches(environment, BUILT_IN, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"task.environment = {environment!r}: expected {', '.join(BUILT_IN)}, gymnasium:ID or module:Class{hint}"
        )
    return True
