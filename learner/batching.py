"""From groups to micro-batches: what sequences have in common is forwarded once, its result read by all of them.

    trajectories [S]  ──inputs (all but the last token) merged, see learner.layout──►  rows
    rows, longest first, cut by token budget  ──►  micro-batches [R, L] + trained tokens [M] that read N positions

With short answers most completions of a group are equal, and all share its prompt, so this saves most of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from async_rl.data import Group
from async_rl.errors import AsyncRLError
from learner.algorithms.advantages import group_advantages
from learner.layout import Ints, Layout, ancestors, choose_layout, cut


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward: R rows of L tokens, N distinct predictions, M trained tokens that read them."""

    inputs_RL: torch.Tensor
    """int64 ``[R, L]``, right-padded with 0."""
    positions_RL: torch.Tensor | None = None
    """int64 ``[R, L]``: position of each token in its sequence; None: its column."""
    visible_RLL: torch.Tensor | None = None
    """bool ``[R, L, L]``: which columns (last axis) each column sees; None: itself and those before it."""
    source_N: torch.Tensor
    """int64 ``[N]``: flattened position whose output predicts the target."""
    targets_N: torch.Tensor
    """int64 ``[N]``: the predicted token."""
    reads_M: torch.Tensor
    """int64 ``[M]``: which of the N predictions each trained token is."""
    behaviour_logprobs_M: torch.Tensor
    """float32 ``[M]``: of the policy that sampled."""
    advantages_M: torch.Tensor
    """float32 ``[M]``."""
    sequence_lengths_M: torch.Tensor
    """float32 ``[M]``: number of trained tokens of the sequence of each token."""
    ages_M: torch.Tensor
    """int64 ``[M]``: version that is trained minus version that sampled."""


def count_micro_batches(lengths: Sequence[int] | Ints, budget: int) -> int:
    """Micro-batches that sequences of ``lengths`` ``[S]`` need when none are merged, as every rank can work out."""
    return len(cut(-np.sort(-np.asarray(lengths, np.int64)), budget)) - 1


def build_micro_batches(
    groups: Sequence[Group],
    *,
    version: int,
    budget: int,
    count: int,
    normalize_std: bool,
    device: torch.device,
    trees: bool = False,
) -> list[MicroBatch]:
    """Merge, sort and pad one mini-batch of this rank.

    Args:
        groups: token groups of this rank.
        version: version that is trained, for the ages.
        budget: most tokens of ``[R, L]``; a single longer row gets a micro-batch of its own.
        count: micro-batches that every rank makes: the largest :func:`count_micro_batches` over the ranks. Merging
            never needs more; what is missing is filled up with empty ones.
        normalize_std: see :func:`group_advantages`.
        device: where the tensors go.
        trees: whether the model can forward trees, see :func:`learner.logprobs.can_forward_trees`.

    Returns:
        ``count`` micro-batches.

    Raises:
        AsyncRLError: a first token is marked as sampled; nothing could have predicted it.
    """
    if not groups:
        return [_empty(device)] * count
    flat = _concatenate(groups, version, normalize_std)
    layout, bounds = choose_layout(flat.tokens, flat.starts, flat.lengths, flat.group, budget, trees)
    micro_batches = [_pad(flat, layout, first, last, device) for first, last in pairwise(bounds)]
    return micro_batches + [_empty(device)] * (count - len(micro_batches))


@dataclass(frozen=True, slots=True)
class _Flat:
    """All sequences of the mini-batch, concatenated over T tokens."""

    tokens: Ints
    mask: Ints
    logprobs: npt.NDArray[np.float32]
    ages: Ints
    lengths: Ints
    """``[S]``"""
    starts: Ints
    """``[S]``: first token of each sequence."""
    group: Ints
    """``[S]``: group of each sequence."""
    sampled: Ints
    """``[S]``: sampled tokens."""
    advantages: npt.NDArray[np.float32]
    """``[S]``"""


def _concatenate(groups: Sequence[Group], version: int, normalize_std: bool) -> _Flat:
    def joined(name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.concatenate([g.arrays[name] for g in groups]).astype(dtype)

    lengths = np.concatenate([np.asarray(g.lengths, np.int64) for g in groups])
    starts = np.cumsum(lengths) - lengths
    mask = joined("loss_mask", np.int64)
    if mask[starts].any():
        bad = [g.ordinal for g in groups if any(t.loss_mask[0] for t in g.trajectories)]
        raise AsyncRLError(f"groups {bad[:5]}: the first token is marked as sampled, but no token came before it")
    rewards_S = torch.from_numpy(np.concatenate([g.rewards for g in groups]))
    group_S = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
    return _Flat(
        tokens=joined("tokens", np.int64),
        mask=mask,
        logprobs=joined("logprobs", np.float32),
        ages=version - joined("versions", np.int64),
        lengths=lengths,
        starts=starts,
        group=group_S,
        sampled=np.add.reduceat(mask, starts),
        advantages=group_advantages(rewards_S, torch.from_numpy(group_S), normalize_std).numpy(),
    )


def _pad(flat: _Flat, layout: Layout, first: int, last: int, device: torch.device) -> MicroBatch:
    """Build the micro-batch of rows ``first`` to ``last`` (exclusive)."""
    shape = (last - first, max(1, int(layout.lengths_R[first])))
    mine_S = np.flatnonzero((layout.row_S >= first) & (layout.row_S < last))
    token_T = _ranges(flat.starts[mine_S], flat.lengths[mine_S])
    sequence_T = np.repeat(mine_S, flat.lengths[mine_S])
    cell_T = (layout.row_S[sequence_T] - first) * shape[1] + layout.column_T[token_T]
    forwarded = layout.column_T[token_T] >= 0
    inputs_RL = np.zeros(shape, np.int64)
    inputs_RL.flat[cell_T[forwarded]] = flat.tokens[token_T[forwarded]]

    trained = np.flatnonzero(flat.mask[token_T] == 1)
    token_M, sequence_M = token_T[trained], sequence_T[trained]
    source_M = cell_T[trained - 1]  # a token is predicted where the one before it was read
    base = int(flat.tokens.max()) + 1
    distinct_N, reads_M = np.unique(source_M * base + flat.tokens[token_M], return_inverse=True)
    arrays = {
        "inputs_RL": inputs_RL,
        "source_N": distinct_N // base,
        "targets_N": distinct_N % base,
        "reads_M": reads_M,
        "behaviour_logprobs_M": flat.logprobs[token_M],
        "advantages_M": flat.advantages[sequence_M],
        "sequence_lengths_M": flat.sampled[sequence_M].astype(np.float32),
        "ages_M": flat.ages[token_M],
    }
    if layout.trees:
        depth_T = token_T - flat.starts[sequence_T]
        positions_RL, parents_RL = np.zeros(shape, np.int64), np.full(shape, -1)
        positions_RL.flat[cell_T[forwarded]] = depth_T[forwarded]
        below = np.flatnonzero(forwarded & (depth_T > 0))
        parents_RL.flat[cell_T[below]] = layout.column_T[token_T[below] - 1]
        arrays |= {"positions_RL": positions_RL, "visible_RLL": ancestors(parents_RL)}
    return MicroBatch(**{name: torch.from_numpy(array).to(device) for name, array in arrays.items()})


def _empty(device: torch.device) -> MicroBatch:
    whole, real = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device)
    return MicroBatch(
        inputs_RL=whole.view(0, 0),
        source_N=whole,
        targets_N=whole,
        reads_M=whole,
        behaviour_logprobs_M=real,
        advantages_M=real,
        sequence_lengths_M=real,
        ages_M=whole,
    )


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """Concatenation of ``arange(start, start + length)``."""
    before = np.cumsum(lengths) - lengths
    joined: Ints = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
    return joined
