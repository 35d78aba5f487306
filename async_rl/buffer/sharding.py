"""Splits the batch of a step into mini-batches and ranks. Pure.

groups in ordinal order ─► contiguous mini-batches ─► inside each: longest first to the least loaded rank
                                 └─► global counts (denominators of the loss) and every rank's sequence lengths
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    """Per mini-batch, over all ranks: ``groups``, ``sequences`` and sampled ``tokens``, or ``steps`` that acted."""
    costs: list[list[list[int]]]
    """Per mini-batch, per rank: length T of each sequence in the order of the rank's groups; T · N of a fragment."""

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
    """Split a batch by cost: tokens (prompts included, because they are computed too), or steps of environments."""
    lengths = [_lengths(g) for g in groups]
    assigned = assign([sum(parts) for parts in lengths], num_minibatches, num_ranks)
    unit = "steps" if any("tokens" not in g.arrays for g in groups) else "tokens"
    counts = [{"groups": 0, "sequences": 0, unit: 0} for _ in range(num_minibatches)]
    costs: list[list[list[int]]] = [[[] for _ in range(num_ranks)] for _ in range(num_minibatches)]
    for group, parts, (minibatch, owner) in zip(groups, lengths, assigned, strict=True):
        counts[minibatch]["groups"] += 1
        counts[minibatch]["sequences"] += len(group)
        counts[minibatch][unit] += group.num_sampled
        costs[minibatch][owner].extend(parts)
    shards = []
    for rank in range(num_ranks):
        mine = [i for i, (_, owner) in enumerate(assigned) if owner == rank]
        shards.append(Shard(tuple(groups[i] for i in mine), tuple(assigned[i][0] for i in mine)))
    return Split(tuple(shards), counts, costs)


def _lengths(group: Group) -> tuple[int, ...]:
    """What the group costs, by sequence: a fragment of T steps of N environments is one of T · N."""
    return (group.arrays["versions"].size,) if "step_rewards" in group.arrays else group.lengths
