"""Where each token of a mini-batch is forwarded, so that what sequences have in common is forwarded once.

    rows    one row per distinct input; an input that is a prefix of another lies inside it
    trees   every distinct prefix of the groups in a row is one node, and a mask lets each node see its ancestors only

                              7 ─ 1 ─ 2        columns   0 1 2 3 4 5 6 7 8
    prompt 5 + 3 =    5 + 3 = ┤                tokens    5 + 3 = 7 8 1 0 2
                              8 ─ 0            parent    . 0 1 2 3 3 4 5 6

    groups that begin alike (a system prompt, worked examples) stand in the same row, so that this, too, is one path

Both are exact: a causal model computes the same hidden state for equal prefixes, and the gradient of a position is the
sum over the sequences that read it. Trees need an attention that takes a mask; rows need none.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MAX_TREE = 1024
"""Most nodes of a row of trees: its mask has the square of that."""
ATTENTION = 512
"""Length of a row of trees at which attention, masked but computed for all pairs, costs as much as all else."""
WORTH = 0.8
"""Trees are taken when they forward at most this share of what rows forward: the mask has a price, too."""
SLACK, SMALL = 1.1, 512
"""A micro-batch ends where padding would add more than a tenth, once it has this many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Row and column of every input token (all tokens of a sequence but its last)."""

    lengths_R: Ints
    """``[R]``: tokens of each row, longest first."""
    row_S: Ints
    """``[S]``: row of each sequence."""
    column_T: Ints
    """``[T]``: column of each token, all sequences concatenated; -1 for the last token of a sequence."""
    trees: bool
    """Whether a row needs positions and a mask."""


def cut(lengths_R: Ints, budget: int, even: bool = True) -> list[int]:
    """Bounds of consecutive runs of rows (longest first) whose padded size stays within ``budget`` tokens.

    Args:
        lengths_R: tokens of each row, longest first.
        budget: most tokens of a run, padding included; a single longer row is a run of its own.
        even: end a run, too, where rows become so short that padding them costs more than another run.
    """
    bounds = [0]
    while bounds[-1] < len(lengths_R):
        first = bounds[-1]
        longest = max(1, int(lengths_R[first]))
        run = lengths_R[first : first + max(1, budget // longest)]
        if even:
            padded = longest * np.arange(1, len(run) + 1)
            uneven = (padded > SMALL) & (padded > SLACK * np.cumsum(run))
            uneven[0] = False
            run = run[: int(uneven.argmax())] if uneven.any() else run
        bounds.append(first + len(run))
    return bounds


def padded_tokens(layout: Layout, bounds: list[int]) -> int:
    """Tokens that are forwarded, padding included."""
    return sum((b - a) * int(layout.lengths_R[a]) for a, b in pairwise(bounds))


def choose_layout(
    tokens_T: Ints, starts_S: Ints, lengths_S: Ints, group_S: Ints, budget: int, trees: bool
) -> tuple[Layout, list[int]]:
    """The cheaper layout with its :func:`cut`; rows, unless trees are allowed and worth it.

    Args:
        tokens_T: all sequences concatenated.
        starts_S: first token of each sequence.
        lengths_S: tokens of each sequence.
        group_S: group of each sequence, from 0.
        budget: most tokens of a micro-batch.
        trees: whether the model can forward trees.
    """
    # merging must never need more micro-batches than all sequences apart, because every rank counts on that bound
    most = len(cut(-np.sort(-lengths_S), budget))

    def bounds_of(lengths_R: Ints) -> list[int]:
        bounds = cut(lengths_R, budget)
        return bounds if len(bounds) <= most else cut(lengths_R, budget, even=False)

    rows = lay_rows(tokens_T, starts_S, lengths_S)
    row_bounds = bounds_of(rows.lengths_R)
    forest = lay_trees(tokens_T, starts_S, lengths_S, group_S, min(budget, MAX_TREE)) if trees else None
    if forest is None:
        return rows, row_bounds
    bounds = bounds_of(forest.lengths_R)
    fits = len(bounds) <= most and forest.lengths_R[0] <= max(budget, rows.lengths_R[0])
    pays = padded_tokens(forest, bounds) <= WORTH * padded_tokens(rows, row_bounds)
    return (forest, bounds) if fits and pays else (rows, row_bounds)


def lay_rows(tokens_T: Ints, starts_S: Ints, lengths_S: Ints) -> Layout:
    """One row per distinct input that is no prefix of another input.

    Sorted as byte strings (big-endian, so that order is token order), a prefix stands right before what extends it.
    """
    raw = tokens_T.astype(">i4")
    inputs = [raw[s : s + n - 1].tobytes() for s, n in zip(starts_S, lengths_S, strict=True)]
    order = sorted(range(len(inputs)), key=inputs.__getitem__)
    owner = np.empty(len(inputs), np.int64)
    keeper = order[-1]
    for index in reversed(order):
        if not inputs[keeper].startswith(inputs[index]):
            keeper = index
        owner[index] = keeper
    kept = np.unique(owner)
    kept = kept[np.argsort(-lengths_S[kept], kind="stable")]
    position = np.empty(len(inputs), np.int64)
    position[kept] = np.arange(len(kept))
    column_T = np.arange(len(tokens_T)) - np.repeat(starts_S, lengths_S)
    column_T[starts_S + lengths_S - 1] = -1
    return Layout(lengths_R=lengths_S[kept] - 1, row_S=position[owner], column_T=column_T, trees=False)


def lay_trees(tokens_T: Ints, starts_S: Ints, lengths_S: Ints, group_S: Ints, longest: int = MAX_TREE) -> Layout | None:
    """Groups in the order of their tokens, in rows of about equal size; the groups of a row have one tree in common.

    Args:
        tokens_T: all sequences concatenated.
        starts_S: first token of each sequence.
        lengths_S: tokens of each sequence.
        group_S: group of each sequence, from 0.
        longest: most nodes of a row that several groups share.

    Returns:
        ``None`` if a group alone has more than ``MAX_TREE`` nodes.
    """
    node_T = _grow(tokens_T, starts_S, lengths_S)
    read = node_T >= 0
    group_T = np.repeat(group_S, lengths_S)[read]
    _, group_N, _ = _distinct(group_T, node_T[read])
    sizes_G = np.bincount(group_N, minlength=int(group_S.max()) + 1)
    if sizes_G.max() > MAX_TREE:
        return None
    order_G, shared_G = _neighbours(tokens_T, starts_S, lengths_S, group_S)
    row_G = np.empty_like(sizes_G)
    row_G[order_G] = _fill(sizes_G[order_G], shared_G, longest)
    # nodes are numbered by depth, so a node's rank within its row comes after its parent's
    reader_T, row_N, first_N = _distinct(row_G[group_T], node_T[read])
    lengths_R = np.bincount(row_N, minlength=int(row_G.max()) + 1)
    column_T = np.full(len(tokens_T), -1)
    column_T[read] = (np.arange(len(row_N)) - first_N)[reader_T]
    order_R = np.argsort(-lengths_R, kind="stable")
    rank_R = np.empty_like(order_R)
    rank_R[order_R] = np.arange(len(order_R))
    return Layout(lengths_R=lengths_R[order_R], row_S=rank_R[row_G[group_S]], column_T=column_T, trees=True)


def ancestors(parents_RL: Ints) -> Bools:
    """Which columns each column sees: itself and its ancestors.

    Args:
        parents_RL: column of the parent, smaller than the own one; -1 for roots and padding.

    Returns:
        bool ``[R, L, L]``.
    """
    rows, width = parents_RL.shape
    # one more column, always empty, is what -1 points at
    visible = np.zeros((rows, width + 1, width), np.bool_)
    index = np.arange(rows)
    for column in range(width):
        visible[:, column] = visible[index, parents_RL[:, column]]
        visible[:, column, column] = True
    return visible[:, :width]


def _grow(tokens_T: Ints, starts_S: Ints, lengths_S: Ints) -> Ints:
    """Number the distinct prefixes by depth: node ``[T]`` of each input token, -1 for the last token of a sequence."""
    base = int(tokens_T.max()) + 1
    node_T = np.full(len(tokens_T), -1)
    parent_S = np.zeros_like(lengths_S)
    count = 0
    for depth in range(int(lengths_S.max()) - 1):
        mine = np.flatnonzero(lengths_S > depth + 1)
        token = tokens_T[starts_S[mine] + depth]
        distinct, inverse = np.unique(parent_S[mine] * base + token, return_inverse=True)
        node_T[starts_S[mine] + depth] = count + inverse
        parent_S[mine] = count + inverse
        count += len(distinct)
    return node_T


def _distinct(owner_I: Ints, node_I: Ints) -> tuple[Ints, Ints, Ints]:
    """Distinct pairs of owner and node, in this order.

    Returns:
        Which pair each of the given ones is ``[I]``; of each pair its owner ``[N]`` and the first pair of that ``[N]``.
    """
    base = int(node_I.max(initial=0)) + 1
    pairs_N, pair_I = np.unique(owner_I * base + node_I, return_inverse=True)
    owner_N = pairs_N // base
    return pair_I, owner_N, np.searchsorted(owner_N, owner_N)


def _neighbours(tokens_T: Ints, starts_S: Ints, lengths_S: Ints, group_S: Ints) -> tuple[Ints, Ints]:
    """Groups in the order of their first sequences' tokens.

    Returns:
        The groups ``[G]`` in that order; how many inputs each has in common with the one before it, at least ``[G]``.
    """
    _, first_G = np.unique(group_S, return_index=True)
    inputs = [tokens_T[starts_S[s] : starts_S[s] + lengths_S[s] - 1] for s in first_G]
    order = sorted(range(len(inputs)), key=lambda group: inputs[group].astype(">i4").tobytes())
    shared = np.zeros(len(inputs), np.int64)
    for position, (before, group) in enumerate(pairwise(order), start=1):
        length = min(len(inputs[before]), len(inputs[group]))
        differing = inputs[before][:length] != inputs[group][:length]
        shared[position] = differing.argmax() if differing.any() else length
    return np.asarray(order), shared


def _fill(sizes_G: Ints, shared_G: Ints, longest: int) -> Ints:
    """Row ``[G]`` of each group, in order: the limit that makes the least work of all powers of two up to ``longest``.

    Args:
        sizes_G: nodes of each group.
        shared_G: of them, how many the group before it in the same row has, too.
        longest: highest limit.
    """
    largest = int(sizes_G.max())
    powers = [1 << power for power in range(4, 11)]
    limits = [largest, *(limit for limit in powers if largest < limit <= longest)]
    trials = [_next_fit(sizes_G, shared_G, limit) for limit in limits]
    rows, width = min(trials, key=lambda trial: (int(trial[0][-1]) + 1) * trial[1] * (1 + trial[1] / ATTENTION))
    low, high = max(largest, width // 2), width
    while low < high:  # as many rows, but evenly filled
        middle = (low + high) // 2
        even, widest = _next_fit(sizes_G, shared_G, middle)
        if even[-1] <= rows[-1]:
            rows, high = even, min(middle, widest)
        else:
            low = middle + 1
    return rows


def _next_fit(sizes_G: Ints, shared_G: Ints, limit: int) -> tuple[Ints, int]:
    """Row of each group when a row ends before it has more than ``limit`` nodes, and the most nodes of a row."""
    rows, row, used, widest = [], 0, 0, 0
    for size, shared in zip(sizes_G.tolist(), shared_G.tolist(), strict=True):
        grown = used + size - (shared if used else 0)
        if used and grown > limit:
            row, grown = row + 1, size
        rows.append(row)
        used = grown
        widest = max(widest, used)
    return np.asarray(rows), widest
