"""A problem, the data of a task, and the split into training and held-out problems."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, str]
"""One message of a chat: ``role`` and ``content``."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One question, and what its verifier needs to score an answer."""

    prompt: str
    """Text as the data has it, without instruction or chat template."""
    columns: Mapping[str, Any]
    """Further columns by name (``answer``, ...): plain values that JSON can hold."""
    before: tuple[Message, ...] = ()
    """Messages of a chat before the prompt, which is its last one; only with ``task.chat``."""


def is_plain(value: Any) -> bool:
    """Whether a column's value is what JSON can hold: text, numbers, lists and structures of them."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    return isinstance(value, str | int | float | bool | None)


@dataclass(frozen=True, slots=True)
class TaskData:
    """The problems of a task and who scores the answers."""

    train: Sequence[Problem]
    heldout: Sequence[Problem]
    """Never trained on, the same in every run."""
    verifier: str
    """``module:function`` with the signature ``f(prompts, completions, **columns) -> list[float]``."""


def hold_out(keyed: Iterable[tuple[object, Problem]], holdout: int) -> tuple[list[Problem], list[Problem]]:
    """Split into ``(train, heldout)``; problems of one key (a family: 12+34 and 34+12) stay on one side.

    At most ``holdout`` problems and at most a fifth of all are held out. Families are visited in a fixed random order
    and one is held out if it fits whole, so the result depends on nothing but the arguments.
    """
    families: dict[object, list[Problem]] = {}
    for key, problem in keyed:
        families.setdefault(key, []).append(problem)
    room = min(holdout, sum(len(f) for f in families.values()) // 5)
    order = list(families.values())
    random.Random("holdout").shuffle(order)
    train: list[Problem] = []
    heldout: list[Problem] = []
    for family in order:
        fits = len(heldout) + len(family) <= room
        (heldout if fits else train).extend(family)
    return train, heldout
