"""Where each token of a mini-batch is forwarded, so that what sequences have in common is forwarded once.

    rows    one row per distinct input; an input that is a prefix of another lies inside it
    trees   one tree per group: every distinct prefix is one node; several trees share a row, and a mask lets each node
            see its ancestors only

                              7 ─ 1 ─ 2        columns   0 1 2 3 4 5 6 7 8
    prompt 5 + 3 =    5 + 3 = ┤                tokens    5 + 3 = 7 8 1 0 2
                              8 ─ 0            parent    . 0 1 2 3 3 4 5 6

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
"""Most nodes of a tree: its mask has the square of that."""
WORTH = 0.8
"""Trees are taken when they forward at most this share of what rows forward: the mask has a price, too."""


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


def cut(lengths_R: Ints, budget: int) -> list[int]:
    """Bounds of consecutive runs of rows (longest first) whose padded size stays within ``budget`` tokens."""
    bounds = [0]
    while bounds[-1] < len(lengths_R):
        first = bounds[-1]
        bounds.append(min(len(lengths_R), first + max(1, budget // max(1, int(lengths_R[first])))))
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
    rows = lay_rows(tokens_T, starts_S, lengths_S)
    row_bounds = cut(rows.lengths_R, budget)
    forest = lay_trees(tokens_T, starts_S, lengths_S, group_S) if trees else None
    if forest is None:
        return rows, row_bounds
    bounds = cut(forest.lengths_R, budget)
    # never more micro-batches than rows need, because every rank counts on that bound, and no row over the budget
    fits = len(bounds) <= len(row_bounds) and forest.lengths_R[0] <= max(budget, rows.lengths_R[0])
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


def lay_trees(tokens_T: Ints, starts_S: Ints, lengths_S: Ints, group_S: Ints) -> Layout | None:
    """One tree per group, packed into rows as long as the largest; ``None`` if one has more than ``MAX_TREE`` nodes."""
    node_T, group_N = _grow(tokens_T, starts_S, lengths_S, group_S)
    sizes_G = np.bincount(group_N, minlength=int(group_S.max()) + 1)
    if sizes_G.max() > MAX_TREE:
        return None
    # nodes are numbered by depth, so a node's rank within its group comes after its parent's
    order = np.argsort(group_N, kind="stable")
    column_N = np.empty_like(group_N)
    column_N[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes_G) - sizes_G, sizes_G)
    row_G, offset_G, lengths_R = _pack(sizes_G)
    column_N += offset_G[group_N]
    column_T = np.where(node_T >= 0, column_N[node_T], -1)
    return Layout(lengths_R=lengths_R, row_S=row_G[group_S], column_T=column_T, trees=True)


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


def _grow(tokens_T: Ints, starts_S: Ints, lengths_S: Ints, group_S: Ints) -> tuple[Ints, Ints]:
    """Number the distinct prefixes of each group, by depth: node ``[T]`` of each input token, and group ``[N]``."""
    base = int(tokens_T.max()) + 1
    num_groups = int(group_S.max()) + 1
    node_T = np.full(len(tokens_T), -1)
    parent_S = group_S.copy()  # the roots' parents are the groups themselves, nodes are numbered after them
    groups, count = [], 0
    for depth in range(int(lengths_S.max()) - 1):
        mine = np.flatnonzero(lengths_S > depth + 1)
        token = tokens_T[starts_S[mine] + depth]
        _, first, inverse = np.unique(parent_S[mine] * base + token, return_index=True, return_inverse=True)
        node_T[starts_S[mine] + depth] = count + inverse
        parent_S[mine] = num_groups + count + inverse
        groups.append(group_S[mine[first]])
        count += len(first)
    return node_T, np.concatenate(groups) if groups else np.zeros(0, np.int64)


def _pack(sizes_G: Ints) -> tuple[Ints, Ints, Ints]:
    """Put trees into rows no longer than the largest, largest first, each into the first row with room.

    Returns:
        Row ``[G]`` and first column ``[G]`` of each tree; length ``[R]`` of each row, longest first.
    """
    row_G, offset_G = np.zeros_like(sizes_G), np.zeros_like(sizes_G)
    filled: list[int] = []
    for group in np.argsort(-sizes_G, kind="stable"):
        size = int(sizes_G[group])
        row = next((r for r, used in enumerate(filled) if used + size <= sizes_G.max()), len(filled))
        if row == len(filled):
            filled.append(0)
        row_G[group], offset_G[group] = row, filled[row]
        filled[row] += size
    lengths = np.asarray(filled, np.int64)
    order = np.argsort(-lengths, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[row_G], offset_G, lengths[order]
