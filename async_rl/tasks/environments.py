"""The problems of an environment. The environments themselves run on actor hosts, see ``actors.environments``."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator

from async_rl.errors import ConfigError
from async_rl.tasks import calculator, frozenlake, guess
from async_rl.tasks.problem import Problem

BUILT_IN = ("calculator", "guess")
GYMNASIUM = "gymnasium:"
_FROZEN_LAKE = "gymnasium:FrozenLake-v1"
_SEEDS = 2_500
"""Problems of a gymnasium environment that has only seeds to tell one from another."""


def environment_problems(environment: str, digits: int) -> Iterator[tuple[object, Problem]]:
    """The problems that ``task.environment`` brings, as ``(key, problem)``; the same ones in every process.

    Args:
        environment: ``calculator``, ``guess``, ``gymnasium:ID`` or ``module:Class``, whose ``problems()`` is called.
        digits: of each operand (``calculator``).

    Raises:
        ConfigError: there is no such environment, or its problems are not of this form.
    """
    if environment == "calculator":
        return calculator.problems(digits)
    if environment == "guess":
        return guess.problems()
    if environment == _FROZEN_LAKE:
        return frozenlake.problems()
    if environment.startswith(GYMNASIUM):
        name = environment.removeprefix(GYMNASIUM)
        return iter([(i, Problem(prompt=f"{name} {i}", columns={"seed": i})) for i in range(_SEEDS)])
    return iter(_of_class(environment))


def _of_class(environment: str) -> list[tuple[object, Problem]]:
    module, colon, name = environment.partition(":")
    if not (module and colon and name):
        near = difflib.get_close_matches(environment, BUILT_IN, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"task.environment = {environment!r}: expected {', '.join(BUILT_IN)}, gymnasium:ID or module:Class{hint}"
        )
    try:
        made = list(getattr(importlib.import_module(module), name).problems())
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"task.environment = {environment!r}: {name}.problems() cannot be had: {type(error).__name__}: {error}; "
            "write it as a static method, or set task.data"
        ) from error
    for entry in made:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], Problem)):
            raise ConfigError(
                f"task.environment = {environment!r}: problems() must yield (key, async_rl.tasks.Problem), "
                f"got {entry!r:.80}"
            )
    return made
