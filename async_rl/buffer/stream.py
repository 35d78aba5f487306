"""The task stream: which task belongs to which ordinal. Deterministic, so nothing is skipped or repeated.

ordinal ──► (epoch, position) = divmod(ordinal, num_tasks) ──► permutation of (seed, epoch) at position
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from numpy.random import Generator, Philox  # now: numpy would open files when it is first used


def task_index(seed: int, ordinal: int, num_tasks: int) -> int:
    """Task at a position of the stream: every epoch of ``num_tasks`` ordinals visits each task once, in a new order.

    Raises:
        ValueError: a negative ordinal, or no tasks.
    """
    if ordinal < 0 or num_tasks < 1:
        raise ValueError(f"ordinal {ordinal} of {num_tasks} tasks")
    epoch, position = divmod(ordinal, num_tasks)
    return int(_permutation(seed, epoch, num_tasks)[position])


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_tasks: int) -> npt.NDArray[np.int64]:
    key = np.array([seed, epoch], np.uint64)
    return Generator(Philox(key=key)).permutation(num_tasks)
