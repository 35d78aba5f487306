"""Trees of prefixes: an example drawn by hand, and gradients that equal those of plain rows."""

import numpy as np
import pytest
import torch

from learner.batching import build_micro_batches, plan_micro_batches
from learner.layout import ancestors, choose_layout, cut, lay_rows, lay_trees
from learner.logprobs import can_forward_trees
from learner.sequences import concatenate
from learner.signals import Signals


def flat(*groups):
    """Concatenate groups of token lists: tokens, starts, lengths, group of each sequence."""
    sequences = [(np.asarray(s), g) for g, group in enumerate(groups) for s in group]
    lengths = np.asarray([len(s) for s, _ in sequences])
    return (
        np.concatenate([s for s, _ in sequences]),
        np.cumsum(lengths) - lengths,
        lengths,
        np.asarray([g for _, g in sequences]),
    )


def test_a_tree_has_one_node_per_distinct_prefix():
    # prompt 5 6, then 7 1 (twice) and 8; the last token of a sequence is only predicted, so the inputs are
    # 5 6 7, 5 6 7 and 5 6: three nodes for eleven tokens
    layout = lay_trees(*flat([[5, 6, 7, 1], [5, 6, 7, 1], [5, 6, 8]]))
    assert layout.column_T.tolist() == [0, 1, 2, -1, 0, 1, 2, -1, 0, 1, -1]
    assert layout.row_S.tolist() == [0, 0, 0]
    assert layout.lengths_R.tolist() == [3]


def test_branches_follow_their_parents_in_order_of_depth():
    # inputs 5 7 1, 5 8 0 and 5 7 2: node 5; then 7 and 8; then 7-1, 7-2 and 8-0
    layout = lay_trees(*flat([[5, 7, 1, 9], [5, 8, 0, 9], [5, 7, 2, 9]]))
    assert layout.column_T.tolist() == [0, 1, 3, -1, 0, 2, 5, -1, 0, 1, 4, -1]
    parents = np.asarray([[-1, 0, 0, 1, 1, 2]])
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]
    assert ancestors(parents)[0].astype(int).tolist() == expected


def test_groups_that_begin_alike_share_what_they_have_in_common():
    # all inputs are prefixes of 1 2 3 4: four nodes for four groups
    same = [1, 2, 9]
    layout = lay_trees(*flat([[1, 2, 3, 4, 9]], [same], [same], [[1, 9]]))
    assert layout.lengths_R.tolist() == [4]
    assert layout.row_S.tolist() == [0, 0, 0, 0]
    assert layout.column_T.tolist() == [0, 1, 2, 3, -1, 0, 1, -1, 0, 1, -1, 0, -1]


def test_groups_that_have_nothing_in_common_fill_rows_up_to_the_limit():
    # trees of 4, 2, 2 and 1 nodes, in the order of their first tokens: 4 | 2 + 2 | 1, or all nine in one row
    groups = flat([[1, 2, 3, 4, 9]], [[5, 6, 9]], [[6, 5, 9]], [[7, 9]])
    layout = lay_trees(*groups, longest=4)
    assert layout.lengths_R.tolist() == [4, 4, 1]
    assert layout.row_S.tolist() == [0, 1, 1, 2]
    # columns go by depth: 5 and 6, then 5-6 and 6-5
    assert layout.column_T.tolist() == [0, 1, 2, 3, -1, 0, 2, -1, 1, 3, -1, 0, -1]
    assert lay_trees(*groups).lengths_R.tolist() == [9]


def test_equal_prefixes_in_different_rows_are_forwarded_in_each():
    # 1-2 is in all three groups of two or three nodes: 1-2-3 and 1-2-4 are four together, 1-2-5 would be the fifth
    groups = flat(*[[[1, 2, n, 9]] for n in (3, 4, 5)])
    layout = lay_trees(*groups, longest=4)
    assert sorted(layout.lengths_R.tolist()) == [3, 3, 3]  # a limit of three is not left for powers of two below 16
    assert lay_trees(*groups).lengths_R.tolist() == [5]


def test_a_micro_batch_ends_where_padding_would_cost_more_than_another():
    lengths = np.asarray([300, 300, 100, 100, 100])
    # a third row of 300 would hold 100: 900 for 700; three of 100 have no padding
    assert cut(lengths, 1000) == [0, 2, 5]
    assert cut(lengths, 1000, even=False) == [0, 3, 5]
    assert cut(np.asarray([50, 10, 10]), 1000) == [0, 3]  # too small for that to matter
    assert cut(np.asarray([2000, 10]), 1000) == [0, 1, 2]


@pytest.mark.parametrize("budget", [8, 64, 700, 4096])
def test_merged_inputs_need_no_more_micro_batches_than_all_sequences_apart(budget):
    rng = np.random.default_rng(0)
    for seed in range(20):
        lengths = rng.integers(2, 1 + (8, 80, 300)[seed % 3], 24).tolist()
        sequences = flat(
            *[[[1, *rng.integers(0, 3, n - 1).tolist()] for n in lengths[g : g + 4]] for g in range(0, 24, 4)]
        )
        most = len(cut(-np.sort(-sequences[2]), budget))
        for trees in (False, True):
            assert len(choose_layout(*sequences, budget, trees)[1]) <= most


def test_trees_are_taken_only_when_they_save_work():
    shared = flat([[1, 2, 3, 4, 5, n, 9] for n in range(6)])
    apart = flat(*[[[n, 2, 3, 4, 9]] for n in range(6)])
    assert choose_layout(*shared, 1000, True)[0].trees
    assert not choose_layout(*shared, 1000, False)[0].trees
    assert not choose_layout(*apart, 1000, True)[0].trees
    assert not choose_layout(*shared, 6, True)[0].trees  # one micro-batch a row; a tree of 11 nodes would be over it


@pytest.mark.parametrize("budget", [10_000, 60])
def test_gradients_through_trees_equal_those_through_rows(make_groups, make_mini_batch, make_updater, budget):
    groups = make_groups(6, size=8)
    updaters = [make_updater(learner={"micro_batch_tokens": budget}) for _ in range(2)]
    updaters[1].networks.trees = False
    totals = [u.gradient(*u.prepare([make_mini_batch(groups)], version=3)) for u in updaters]
    assert updaters[0].networks.trees
    assert float(totals[0]["tokens"]) == float(totals[1]["tokens"]) == sum(g.num_sampled for g in groups)
    assert (updaters[0].flat.grad - updaters[1].flat.grad).abs().max() < 1e-5
    assert updaters[1].flat.grad.abs().max() > 1e-2


def test_both_layouts_place_the_same_inputs(make_groups):
    groups = make_groups(3, size=6)
    sequences = concatenate(groups, version=3)
    nothing = Signals(advantages_M=torch.zeros(len(sequences.token_M)))
    plans = [plan_micro_batches(sequences, 10_000, trees) for trees in (True, False)]
    device = torch.device("cpu")
    trees, rows = (next(build_micro_batches(sequences, nothing, plan, count=1, device=device)) for plan in plans)
    assert trees.visible_RLL is not None
    assert rows.visible_RLL is None
    assert trees.inputs_RL.numel() < rows.inputs_RL.numel()
    assert trees.targets_N[trees.reads_M].tolist() == rows.targets_N[rows.reads_M].tolist()
    # each source's ancestors, in order, are the prefix that the same trained token has in its row
    width = trees.inputs_RL.shape[1]
    for token in range(len(rows.reads_M)):
        row, column = divmod(int(rows.source_N[rows.reads_M[token]]), rows.inputs_RL.shape[1])
        prefix = rows.inputs_RL[row, : column + 1].tolist()
        row, column = divmod(int(trees.source_N[trees.reads_M[token]]), width)
        assert trees.inputs_RL[row][trees.visible_RLL[row, column]].tolist() == prefix
        assert int(trees.positions_RL[row, column]) == len(prefix) - 1


def test_models_whose_attention_takes_no_free_mask_are_not_given_trees(make_model):
    assert can_forward_trees(make_model())
    eager = make_model()
    eager.set_attn_implementation("eager")
    assert not can_forward_trees(eager)
    sliding = make_model()
    sliding.config.layer_types = ["full_attention", "sliding_attention"]
    assert not can_forward_trees(sliding)


def test_rows_keep_prefixes_inside_what_extends_them():
    layout = lay_rows(*flat([[5, 6, 7, 1], [5, 6, 9], [5, 8, 9]])[:3])
    assert layout.lengths_R.tolist() == [3, 2]
    assert layout.row_S.tolist() == [0, 0, 1]
