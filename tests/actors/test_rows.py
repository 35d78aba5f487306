"""Rows of the KV cache: each distinct prefix has one, and no copy overwrites what is still needed."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.rows import plan_rows


@st.composite
def steps(draw):
    """Rows packed in tiers, the samples on them with the tokens that they drew, and the tiers that they need next."""
    counts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    tier = np.repeat(np.arange(len(counts)), counts)
    place = np.concatenate([np.arange(n) for n in counts]).astype(np.int64)
    wanted = tier + np.array(draw(st.lists(st.integers(0, 1), min_size=len(tier), max_size=len(tier))), np.int64)
    pairs = st.tuples(st.integers(0, max(0, len(tier) - 1)), st.integers(0, 3))
    samples = sorted(draw(st.lists(pairs, max_size=30))) if len(tier) else []
    return tier, place, wanted, samples


@settings(max_examples=300, deadline=None)
@given(steps())
def test_each_distinct_continuation_gets_one_row_packed_in_its_tier(step):
    tier, place, wanted, samples = step
    rows, tokens = (np.array([s[i] for s in samples], np.int64) for i in (0, 1))
    plan = plan_rows(rows, tokens, tier, place, wanted)
    held = {(int(t), int(p)): row for row, (t, p) in enumerate(zip(tier, place, strict=True))}
    for copy in plan.copies:  # one after the other, each reading before it writes
        read = [held[copy.source_tier, int(p)] for p in copy.source]
        held |= {(copy.target_tier, int(p)): row for p, row in zip(copy.target, read, strict=True)}
    homes = list(zip(plan.tier.tolist(), plan.place.tolist(), strict=True))
    assert homes == sorted(homes)  # numbered tier by tier ...
    for number in set(plan.tier.tolist()):  # ... and packed in each
        assert [p for t, p in homes if t == number] == list(range(plan.tier.tolist().count(number)))
    assert sorted(set(plan.row.tolist())) == list(range(len(set(samples)))) == list(range(len(homes)))
    for row, token, new in zip(rows, tokens, plan.row, strict=True):
        assert held[homes[new]] == row == plan.parent[new]
        assert plan.token[new] == token
        assert plan.tier[new] == wanted[row]


def test_nothing_is_copied_while_samples_stay_apart_and_in_their_tier():
    tier, place = np.array([0, 0, 1]), np.array([0, 1, 0])
    plan = plan_rows(np.array([0, 1, 2]), np.array([7, 7, 5]), tier, place, tier)
    assert (plan.row.tolist(), plan.token.tolist(), list(plan.copies)) == ([0, 1, 2], [7, 7, 5], [])


def test_a_row_that_outgrows_its_tier_is_read_before_another_takes_its_place():
    # rows 0, 1 of tier 0; row 0 moves up to tier 1, and row 1 then takes its place
    plan = plan_rows(np.array([0, 1]), np.array([3, 3]), np.array([0, 0]), np.array([0, 1]), np.array([1, 0]))
    copies = [(c.source_tier, c.source.tolist(), c.target_tier, c.target.tolist()) for c in plan.copies]
    assert copies == [(0, [0], 1, [0]), (0, [1], 0, [0])]
    assert plan.row.tolist() == [1, 0]
