"""What mock actors send: groups of random tokens, of which each is another one only by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from async_rl.bench.served import VOCABULARY
from async_rl.data import Group, make_group, token_trajectory
from async_rl.wire.layout import lay_out

BYTES_PER_TOKEN = 13
"""tokens int32, loss_mask uint8, logprobs float32, versions int32."""


def group_of(ordinal: int, attempt: int, task_index: int, version: int, *, size: int, nbytes: int) -> Group:
    """A group of ``size`` trajectories of about ``nbytes`` bytes each, sampled by ``version``; a quarter is prompt."""
    length = max(2, nbytes // BYTES_PER_TOKEN)
    num_prompt = length // 4 or 1
    noise = np.random.default_rng(ordinal)
    trajectories = [
        token_trajectory(
            prompt=noise.integers(0, VOCABULARY, num_prompt).tolist(),
            completion=noise.integers(0, VOCABULARY, length - num_prompt),
            logprobs=-noise.random(length - num_prompt),
            versions=np.full(length - num_prompt, version),
            reward=float(i % 2),
        )
        for i in range(size)
    ]
    return make_group(ordinal=ordinal, attempt=attempt, task_index=task_index, trajectories=trajectories)


class Template:
    """Groups that differ from one another in what names them only.

    Args:
        size: trajectories of a group.
        nbytes: of a trajectory.
    """

    def __init__(self, size: int, nbytes: int) -> None:
        self._size = size
        self._nbytes = nbytes
        self._groups: dict[int, Group] = {}
        """By version."""

    def group(self, ticket: Sequence[Any], name: str) -> Group:
        """What an actor of that name answers a ticket with."""
        ordinal, attempt, task_index, _, version, *_ = ticket
        if version not in self._groups:
            new = group_of(0, 0, 0, version, size=self._size, nbytes=self._nbytes)
            object.__setattr__(new, "laid_out", lay_out(new))
            self._groups[version] = new
        like = self._groups[version]
        meta = {"actor": name, "seconds": 0.25}
        group = replace(like, ordinal=ordinal, attempt=attempt, task_index=task_index, meta=meta)
        object.__setattr__(group, "laid_out", like.laid_out)
        return group
