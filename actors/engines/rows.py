"""Which row of the KV cache each sample is on: one row per distinct token prefix, rows of like length in one tier.

    samples (row, token drawn) ──plan_rows──► rows of the next step, and the copies that must be made first

Samples of one prompt share its row until they draw different tokens; then the row is copied. A row that no longer fits
its tier is copied to the next one. In each tier rows are packed from 0; rows are numbered tier by tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows to be copied to places that nothing continues from."""

    source_tier: int
    source: Ints
    """[num_copies] places in that tier."""
    target_tier: int
    target: Ints
    """[num_copies] places."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which row each sample is on next."""

    row: Ints
    """[num_samples] next row of each sample."""
    parent: Ints
    """[num_rows] the row that each next row continues."""
    token: Ints
    """[num_rows] the token that it continues with."""
    tier: Ints
    """[num_rows] not decreasing."""
    place: Ints
    """[num_rows] in its tier, from 0."""
    copies: Sequence[Copy]
    """In this order: no copy writes what a later one reads."""


def plan_rows(rows: Ints, tokens: Ints, tier: Ints, place: Ints, wanted: Ints) -> RowPlan:
    """Give one row to each distinct (row, token); the first child of a row stays on it where that keeps tiers packed.

    Args:
        rows: [num_samples] current row of each sample that goes on.
        tokens: [num_samples] the token that it drew, not negative.
        tier: [num_rows] of each current row.
        place: [num_rows] in its tier.
        wanted: [num_rows] the tier that its children need, not below its own.
    """
    if (rows[1:] > rows[:-1]).all():  # no row is shared
        parent, token, row_of = rows, tokens, np.arange(len(rows))
    else:
        base = int(tokens.max()) + 1
        children, row_of = np.unique(rows * base + tokens, return_inverse=True)
        parent, token = children // base, children % base
    old_tier, old_place, new_tier = tier[parent], place[parent], wanted[parent]
    count = np.bincount(new_tier, minlength=1)
    stays = (old_tier == new_tier) & (old_place < count[new_tier])
    stays[1:] &= parent[1:] != parent[:-1]
    new_place = np.where(stays, old_place, 0)
    copies = []
    # Long tiers first: what moves up is read before its place is taken. Within a tier a row that is read either stays
    # or lies behind the packed rows, so that it is no target.
    for target in np.unique(new_tier[~stays])[::-1].tolist():
        moved = np.flatnonzero(~stays & (new_tier == target))
        hole = np.ones(count[target], bool)
        hole[old_place[stays & (new_tier == target)]] = False
        new_place[moved] = np.flatnonzero(hole)
        for source in np.unique(old_tier[moved]).tolist():
            at = moved[old_tier[moved] == source]
            copies.append(Copy(source, old_place[at], target, new_place[at]))
    order = np.lexsort((new_place, new_tier))
    number = np.empty(len(parent), np.int64)
    number[order] = np.arange(len(parent))
    return RowPlan(number[row_of], parent[order], token[order], new_tier[order], new_place[order], copies)
