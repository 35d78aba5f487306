"""From groups to micro-batches: every distinct prefix is forwarded once, its log-probability read by all its copies.

    trajectories [S]  ──inputs without the last token; equal ones and prefixes of others merged──►  rows
    rows, longest first, cut by token budget  ──►  micro-batches [R, L] + trained tokens [M] that read N positions

Merging is exact: a causal model computes the same hidden state for equal prefixes, and the gradient of a position is
the sum over the copies that read it. With short answers most completions of a group are equal, so this saves most work.
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

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward: R rows of L tokens, N distinct predictions, M trained tokens that read them."""

    inputs_RL: torch.Tensor
    """int64 ``[R, L]``, right-padded with 0."""
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
    return len(_cut(-np.sort(-np.asarray(lengths, np.int64)), budget)) - 1


def build_micro_batches(
    groups: Sequence[Group],
    *,
    version: int,
    budget: int,
    count: int,
    normalize_std: bool,
    device: torch.device,
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

    Returns:
        ``count`` micro-batches.

    Raises:
        AsyncRLError: a first token is marked as sampled; nothing could have predicted it.
    """
    if not groups:
        return [_empty(device)] * count
    flat = _concatenate(groups, version, normalize_std)
    rows = _merge(flat)
    bounds = _cut(rows.lengths, budget)
    micro_batches = [_pad(flat, rows, first, last, device) for first, last in pairwise(bounds)]
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
    sampled: Ints
    """``[S]``: sampled tokens."""
    advantages: npt.NDArray[np.float32]
    """``[S]``"""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Distinct, maximal inputs, longest first."""

    sequence: Ints
    """``[R]``: a sequence whose input is the row."""
    lengths: Ints
    """``[R]``: tokens of the row."""
    of_sequence: Ints
    """``[S]``: the row that holds the input of each sequence."""


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
    group_S = torch.from_numpy(np.repeat(np.arange(len(groups)), [len(g) for g in groups]))
    return _Flat(
        tokens=joined("tokens", np.int64),
        mask=mask,
        logprobs=joined("logprobs", np.float32),
        ages=version - joined("versions", np.int64),
        lengths=lengths,
        starts=starts,
        sampled=np.add.reduceat(mask, starts),
        advantages=group_advantages(rewards_S, group_S, normalize_std).numpy(),
    )


def _merge(flat: _Flat) -> _Rows:
    """Find the distinct inputs (tokens without the last) that are no prefix of another input.

    Sorted as byte strings (big-endian, so that order is token order), a prefix stands right before what extends it.
    """
    raw = flat.tokens.astype(">i4")
    inputs = [raw[s : s + n - 1].tobytes() for s, n in zip(flat.starts, flat.lengths, strict=True)]
    order = sorted(range(len(inputs)), key=inputs.__getitem__)
    owner = np.empty(len(inputs), np.int64)
    keeper = order[-1]
    for index in reversed(order):
        if not inputs[keeper].startswith(inputs[index]):
            keeper = index
        owner[index] = keeper
    kept = np.unique(owner)
    kept = kept[np.argsort(-flat.lengths[kept], kind="stable")]
    position = np.empty(len(inputs), np.int64)
    position[kept] = np.arange(len(kept))
    return _Rows(sequence=kept, lengths=flat.lengths[kept] - 1, of_sequence=position[owner])


def _cut(lengths: Ints, budget: int) -> list[int]:
    """Bounds of consecutive runs of rows (longest first) whose padded size stays within ``budget`` tokens."""
    bounds = [0]
    while bounds[-1] < len(lengths):
        first = bounds[-1]
        bounds.append(min(len(lengths), first + max(1, budget // max(1, int(lengths[first])))))
    return bounds


def _pad(flat: _Flat, rows: _Rows, first: int, last: int, device: torch.device) -> MicroBatch:
    """Build the micro-batch of rows ``first`` to ``last`` (exclusive)."""
    lengths_R = rows.lengths[first:last]
    width = max(1, int(lengths_R[0]))
    inputs_RL = np.zeros((last - first, width), np.int64)
    filled_RL = np.arange(width) < lengths_R[:, None]
    starts_R = flat.starts[rows.sequence[first:last]]
    inputs_RL[filled_RL] = flat.tokens[(starts_R[:, None] + np.arange(width))[filled_RL]]

    mine_S = np.flatnonzero((rows.of_sequence >= first) & (rows.of_sequence < last))
    token_T = _ranges(flat.starts[mine_S], flat.lengths[mine_S])
    sequence_T = np.repeat(mine_S, flat.lengths[mine_S])
    trained = flat.mask[token_T] == 1
    token_M, sequence_M = token_T[trained], sequence_T[trained]
    source_M = (rows.of_sequence[sequence_M] - first) * width + token_M - flat.starts[sequence_M] - 1
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
