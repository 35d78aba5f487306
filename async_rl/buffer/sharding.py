"""Splits the batch of a step into mini-batches and ranks. Pure.

groups in ordinal order ─► contiguous mini-batches ─► inside each: longest first to the least loaded rank
                                 └─► global counts (denominators of the loss) and every rank's sequence lengths
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_rl.data import Group


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank trains in a step."""

    groups: tuple[Group, ...]
    """In ordinal order."""
    minibatch: tuple[int, ...]
    """Mini-batch of each group."""


@dataclass(frozen=True, slots=True)
class Split:
    """A batch, split."""

    shards: tuple[Shard, ...]
    """One per rank."""
    counts: list[dict[str, int]]
    """Per mini-batch, over all ranks: ``groups``, ``sequences`` and sampled ``tokens``."""
    costs: list[list[list[int]]]
    """Per mini-batch, per rank: the length T of each sequence in the order of the rank's groups."""

    def header(self, rank: int) -> dict[str, Any]:
        """Fields of the ``shard`` message to ``rank``."""
        return {"minibatch": list(self.shards[rank].minibatch), "counts": self.counts, "costs": self.costs}


def assign(costs_per_group: Sequence[int], num_minibatches: int, num_ranks: int) -> list[tuple[int, int]]:
    """(mini-batch, rank) of each group.

    Mini-batches are contiguous, equal to within one group. Inside each, the costliest group goes to the rank with the
    least cost so far (LPT, Graham 1969: at most 4/3 of the best possible maximum); every rank gets at least one group.

    Raises:
        ValueError: a mini-batch has fewer groups than there are ranks.
    """
    num_groups = len(costs_per_group)
    if num_groups // num_minibatches < num_ranks:
        raise ValueError(f"{num_groups} groups in {num_minibatches} mini-batches are too few for {num_ranks} ranks")
    assigned = [(0, 0)] * num_groups
    for minibatch in range(num_minibatches):
        start = minibatch * num_groups // num_minibatches
        stop = (minibatch + 1) * num_groups // num_minibatches
        # The second entry sends free groups to empty ranks, too.
        loads = [(0, 0, rank) for rank in range(num_ranks)]
        for index in sorted(range(start, stop), key=lambda i: (-costs_per_group[i], i)):
            load, count, rank = heapq.heappop(loads)
            assigned[index] = (minibatch, rank)
            heapq.heappush(loads, (load + costs_per_group[index], count + 1, rank))
    return assigned


def split(groups: Sequence[Group], num_minibatches: int, num_ranks: int) -> Split:
    """Split a batch by token cost (prompts included, because they are computed too)."""
    assigned = assign([sum(g.lengths) for g in groups], num_minibatches, num_ranks)
    counts = [{"groups": 0, "sequences": 0, "tokens": 0} for _ in range(num_minibatches)]
    costs: list[list[list[int]]] = [[[] for _ in range(num_ranks)] for _ in range(num_minibatches)]
    for group, (minibatch, owner) in zip(groups, assigned, strict=True):
        counts[minibatch]["groups"] += 1
        counts[minibatch]["sequences"] += len(group)
        counts[minibatch]["tokens"] += int(np.count_nonzero(group.arrays["versions"] >= 0))
        costs[minibatch][owner].extend(group.lengths)
    shards = []
    for rank in range(num_ranks):
        mine = [i for i, (_, owner) in enumerate(assigned) if owner == rank]
        shards.append(Shard(tuple(groups[i] for i in mine), tuple(assigned[i][0] for i in mine)))
    return Split(tuple(shards), counts, costs)
