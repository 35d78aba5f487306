from __future__ import annotations

import itertools

import numpy as np
import pytest
from buffer_helpers import make
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.buffer.sharding import assign, split


def test_the_longest_goes_first_to_the_least_loaded_rank():
    # 9 -> rank 0, 7 -> rank 1, 5 -> rank 1 (7 < 9), 3 -> rank 0 (9 < 12): 12 against 12
    assert assign([3, 9, 5, 7], 1, 2) == [(0, 0), (0, 0), (0, 1), (0, 1)]


def test_minibatches_are_contiguous_and_as_equal_as_possible():
    assert [m for m, _ in assign([1] * 7, 3, 1)] == [0, 0, 1, 1, 2, 2, 2]


def test_every_rank_gets_a_group_even_when_one_group_costs_more_than_all_others():
    assert sorted(r for _, r in assign([1000, 0, 0], 1, 3)) == [0, 1, 2]


def test_too_many_ranks_are_refused():
    with pytest.raises(ValueError, match="too few for 3 ranks"):
        assign([1, 1, 1, 1], 2, 3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 50), min_size=4, max_size=8),
    st.integers(1, 2),
    st.integers(1, 2),
)
def test_each_group_is_dealt_once_and_the_balance_is_within_graham_of_the_best(costs, minibatches, ranks):
    assigned = assign(costs, minibatches, ranks)
    assert [m for m, _ in assigned] == sorted(m for m, _ in assigned)
    for minibatch in range(minibatches):
        mine = [(c, r) for c, (m, r) in zip(costs, assigned, strict=True) if m == minibatch]
        assert {r for _, r in mine} == set(range(ranks))
        worst = max(sum(c for c, r in mine if r == rank) for rank in range(ranks))
        best = min(
            max(sum(c for (c, _), r in zip(mine, deal, strict=True) if r == rank) for rank in range(ranks))
            for deal in itertools.product(range(ranks), repeat=len(mine))
        )
        assert worst <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_the_header_carries_global_counts_and_every_ranks_lengths():
    groups = [make(0, prompt=2, versions=(0,)), make(1, prompt=2, versions=(0, 0)), make(2, prompt=1, versions=(0,))]
    groups.append(make(3, prompt=8, versions=(0,)))
    parts = split(groups, 2, 2)
    # mini-batch 0: ordinals 0 (2 x 3 tokens) and 1 (2 x 4); mini-batch 1: 2 (2 x 2) and 3 (2 x 9)
    assert parts.counts == [{"groups": 2, "sequences": 4, "tokens": 6}, {"groups": 2, "sequences": 4, "tokens": 4}]
    assert parts.costs == [[[4, 4], [3, 3]], [[9, 9], [2, 2]]]
    assert [[g.ordinal for g in shard.groups] for shard in parts.shards] == [[1, 3], [0, 2]]
    assert parts.header(0) == {"minibatch": [0, 1], "counts": parts.counts, "costs": parts.costs}
    assert np.sum([c["tokens"] for c in parts.counts]) == sum(g.num_sampled for g in groups)
