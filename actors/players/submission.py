"""From finished work to the group that is submitted.

    Work (ticket, transcripts) + rewards ─► Group (arrays, rewards, meta)

Facts in ``meta`` are for people and for scorers; the learner needs none of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.players.transcript import arrays_of
from actors.players.work import Work
from async_rl.config import Config
from async_rl.data import Group

SAMPLE_CHARACTERS = 1 << 18
"""Most characters of a group's text that are sent along: it travels in the header, whose size is limited."""


def group_of(work: Work, rewards: Sequence[float], actor: str, config: Config) -> Group:
    """The group of a ticket.

    Args:
        work: whose transcripts are complete.
        rewards: one per sample; NaN where a scorer gives them.
        actor: name of this process.
        config: says what the group tells besides.

    Raises:
        ValueError: there is not one reward for each sample.
    """
    if len(rewards) != len(work.transcripts):
        raise ValueError(f"{len(rewards)} rewards for {len(work.transcripts)} samples")
    ticket = work.ticket
    meta: dict[str, Any] = {"actor": actor, "seconds": round(time.monotonic() - work.since, 4)}
    if config.reward.placement == "scorer":
        meta["finish_reasons"] = [t.turns[-1].finish_reason for t in work.transcripts]
    if config.task.environment:
        meta["turns"] = [len(t.turns) for t in work.transcripts]
        meta["ends"] = [t.end for t in work.transcripts]
    if ticket.ordinal % config.buffer.groups_per_step == 0:  # one text a step, for the report
        most = SAMPLE_CHARACTERS // ticket.group_size
        meta["prompt"] = work.prompt[:SAMPLE_CHARACTERS]
        meta["completions"] = ["\n".join(t.texts)[:most] for t in work.transcripts]
    lengths, arrays = arrays_of(work.transcripts)
    return Group(
        ordinal=ticket.ordinal,
        attempt=ticket.attempt,
        task_index=ticket.task_index,
        lengths=lengths,
        arrays=arrays,
        rewards=np.asarray(rewards, np.float32),
        meta=meta,
    )


def outcomes_of(work: Work) -> Counter[str]:
    """Counters of its episodes: ``turns``, and ``ends_WHY`` (``done``, ``turns``, ``cut``, ``context``)."""
    ends = Counter(f"ends_{t.end}" for t in work.transcripts if t.end)
    return ends + Counter(turns=sum(len(t.turns) for t in work.transcripts)) if ends else ends
