"""Groups and rules for tests of the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from async_rl.buffer.ledger import Ledger
from async_rl.buffer.records import Rules
from async_rl.data import Annotation, Group, make_group, token_trajectory
from async_rl.protocol import Ticket

NUM_TASKS = 7


def rules(**changes: Any) -> Rules:
    return Rules(**{"steps": 6, "groups_per_step": 2, "group_size": 2, "max_staleness": 1, **changes})


def ledger(**changes: Any) -> Ledger:
    return Ledger(rules(**changes), lambda ordinal: ordinal % NUM_TASKS)


def make(
    ordinal: int,
    attempt: int = 0,
    *,
    task_index: int | None = None,
    versions: Sequence[int] = (0,),
    rewards: Sequence[float] = (0.0, 1.0),
    prompt: int = 2,
    meta: dict[str, Any] | None = None,
) -> Group:
    """A group of ``len(rewards)`` trajectories whose sampled tokens carry ``versions``."""
    trajectories = [
        token_trajectory(
            prompt=list(range(prompt)),
            completion=[5] * len(versions),
            logprobs=[-0.5] * len(versions),
            versions=versions,
            reward=reward,
        )
        for reward in rewards
    ]
    index = ordinal % NUM_TASKS if task_index is None else task_index
    return make_group(ordinal=ordinal, attempt=attempt, task_index=index, trajectories=trajectories, meta=meta)


def answer(ticket: Ticket, *, versions: Sequence[int] | None = None, **changes: Any) -> Group:
    """A group that keeps the promise of a ticket."""
    changes = {"rewards": (0.0, *[1.0] * (ticket.group_size - 1)), **changes}
    return make(
        ticket.ordinal,
        ticket.attempt,
        task_index=ticket.task_index,
        versions=versions or (ticket.version,),
        **changes,
    )


def annotation(group: Group, stage: str, value: float | None = None) -> Annotation:
    """What a good scorer adds: rewards 0, ``value``, ``value``, ... or log-probabilities ``value``."""
    if stage == "reward":
        values = np.full(len(group), 1.0 if value is None else value, np.float32)
        values[0] = 0.0
    else:
        values = np.full(sum(group.lengths), -0.25 if value is None else -abs(value), np.float32)
    return Annotation(ordinal=group.ordinal, attempt=group.attempt, stage=stage, values=values)
