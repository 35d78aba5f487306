"""The curriculum: fresh ordinals get the tasks that teach most, those that are solved sometimes. Pure, deterministic.

task stream at position 0, 1, 2, ... ─► keep with probability weight(pass rate of the task) ─► task of the next ordinal
                                            ▲
    rewards of a finished group ─► observe ─┘     weight: unseen 1, else 4·p·(1-p), at least FLOOR

The advantage of a group-relative algorithm has a variance of p·(1-p) for pass rate p: a task that is solved always or
never gives no gradient. The floor lets such a task come back, since the policy changes. Whether a position is kept is
decided by a hash of (seed, position), so the same events give the same picks, after a resume too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rl.data import is_correct

DECAY = 0.7
"""A group counts so much less with each later group of its task."""
FLOOR = 0.1
"""Least probability that a position of the stream is kept."""


@dataclass(slots=True)
class Record:
    """A task's groups so far, decayed."""

    passed: float = 0.0
    """Sum over groups of the share that was correct."""
    groups: float = 0.0
    """Sum over groups of 1."""

    def add(self, share: float) -> None:
        """One more group."""
        self.passed = DECAY * self.passed + share
        self.groups = DECAY * self.groups + 1

    @property
    def pass_rate(self) -> float:
        """Decayed mean share of correct answers, between 0 and 1."""
        return self.passed / self.groups


class Curriculum:
    """Picks tasks for one run.

    Args:
        stream: the task at a position of the plain stream.
        seed: of the run.
    """

    def __init__(self, stream: Callable[[int], int], seed: int) -> None:
        self._stream = stream
        self._seed = seed
        self._records: dict[int, Record] = {}
        self.position = 0
        """Next position of the stream to look at."""

    def pick(self) -> int:
        """The task of the next fresh ordinal."""
        while True:
            position, self.position = self.position, self.position + 1
            task_index = self._stream(position)
            if _draw(self._seed, position) < self.weight(task_index):
                return task_index

    def weight(self, task_index: int) -> float:
        """Probability that the task is kept where the stream comes to it."""
        record = self._records.get(task_index)
        if record is None:
            return 1.0
        return max(FLOOR, 4 * record.pass_rate * (1 - record.pass_rate))

    def observe(self, task_index: int, rewards: npt.NDArray[np.float32]) -> None:
        """A group of the task was scored: finite rewards ``[G]``."""
        self._records.setdefault(task_index, Record()).add(float(is_correct(rewards).mean()))

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        records = [[task, r.passed, r.groups] for task, r in self._records.items()]
        return {"position": self.position, "records": records}

    def restore(self, plain: dict[str, Any]) -> None:
        """Take up what :meth:`to_plain` gave."""
        self.position = int(plain["position"])
        self._records = {int(task): Record(float(p), float(n)) for task, p, n in plain["records"]}


def _draw(seed: int, position: int) -> float:
    """Uniform in [0, 1), by hash."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
