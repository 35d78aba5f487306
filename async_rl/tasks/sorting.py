"""Sorting: ``sort c a b: `` is answered by ``a b c``, ``sort 3 1 2: `` by ``1 2 3``."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

from async_rl.errors import ConfigError
from async_rl.tasks.problem import Problem

_DRAWS = 20_000


def problems(length: int) -> Iterator[tuple[object, Problem]]:
    """Make lists of ``length`` digits or lower-case letters, drawn without repeats.

    Yields:
        ``(key, problem)``: lists that differ only in their order share a key.

    Raises:
        ConfigError: a list of one element needs no sorting.
    """
    if length < 2:
        raise ConfigError(f"task.digits = {length}: a list to sort has at least 2 elements")
    rng = random.Random(f"sorting-{length}")
    drawn = (tuple(rng.choices(rng.choice((string.digits, string.ascii_lowercase)), k=length)) for _ in range(_DRAWS))
    for items in dict.fromkeys(drawn):
        answer = tuple(sorted(items))
        yield answer, Problem(prompt=f"sort {' '.join(items)}: ", columns={"answer": " ".join(answer)})
