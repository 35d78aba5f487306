"""From sequences to micro-batches: what they have in common is forwarded once, its result read by all of them.

    sequences [S]  ──inputs (all but the last token) merged, see learner.layout──►  rows
    rows, longest first, cut by token budget  ──►  micro-batches [R, L] + trained tokens [M] that read N positions

With short answers most completions of a group are equal, and all share its prompt, so this saves most of the work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from learner.layout import Ints, Layout, ancestors, choose_layout, cut
from learner.sequences import Sequences
from learner.signals import Signals


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
    index_M: torch.Tensor
    """int64 ``[M]``: which trained token of the mini-batch (:class:`learner.sequences.Sequences`) each one is."""
    sequence_M: torch.Tensor
    """int64 ``[M]``: sequence of each token, from 0; tokens of a sequence are whole here, and in order of time."""
    num_sequences: int
    """Sequences that have a trained token here."""
    behaviour_logprobs_M: torch.Tensor
    """float32 ``[M]``: of the policy that sampled."""
    advantages_M: torch.Tensor
    """float32 ``[M]``."""
    sequence_lengths_M: torch.Tensor
    """float32 ``[M]``: number of trained tokens of the sequence of each token."""
    ages_M: torch.Tensor
    """int64 ``[M]``: version that is trained minus version that sampled."""
    proximal_logprobs_M: torch.Tensor | None = None
    """float32 ``[M]``: of the policy at the start of the step; None: not recomputed."""
    ref_logprobs_M: torch.Tensor | None = None
    """float32 ``[M]``: of the reference; None: not known before the forward pass."""
    old_values_M: torch.Tensor | None = None
    """float32 ``[M]``: of the critic at the start of the step; None: there is none."""
    returns_M: torch.Tensor | None = None
    """float32 ``[M]``: what the critic learns to predict; None: there is none."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the tokens of a mini-batch are forwarded, and where micro-batches are cut."""

    layout: Layout
    bounds: list[int]
    """Micro-batch ``i`` has the rows from ``bounds[i]`` to ``bounds[i + 1]`` (exclusive)."""


def count_micro_batches(lengths: Sequence[int] | Ints, budget: int) -> int:
    """Micro-batches that sequences of ``lengths`` ``[S]`` need when none are merged, as every rank can work out."""
    return len(cut(-np.sort(-np.asarray(lengths, np.int64)), budget)) - 1


def plan_micro_batches(sequences: Sequences, budget: int, trees: bool = False) -> Plan | None:
    """Merge and sort one mini-batch of this rank; None if it has no sequence.

    Args:
        sequences: of the mini-batch.
        budget: most tokens of ``[R, L]``; a single longer row gets a micro-batch of its own.
        trees: whether the model can forward trees, see :func:`learner.logprobs.can_forward_trees`.
    """
    if not len(sequences.lengths_S):
        return None
    flat = (sequences.tokens_T, sequences.starts_S, sequences.lengths_S, sequences.group_S)
    return Plan(*choose_layout(*flat, budget, trees))


def build_micro_batches(
    sequences: Sequences, signals: Signals, plan: Plan | None, *, count: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Pad one mini-batch of this rank, one micro-batch at a time: their masks are large.

    Args:
        sequences: of the mini-batch.
        signals: of its trained tokens.
        plan: of :func:`plan_micro_batches`.
        count: micro-batches that every rank makes: the largest :func:`count_micro_batches` over the ranks. Merging
            never needs more; what is missing is filled up with empty ones.
        device: where the tensors go.

    Yields:
        ``count`` micro-batches, or as many as the plan has if that is more.
    """
    bounds = plan.bounds if plan else [0]
    for first, last in pairwise(bounds):
        assert plan is not None
        yield _pad(sequences, signals, plan.layout, first, last, device)
    for _ in range(count - len(bounds) + 1):
        yield _zeros(0, ["advantages_M"], device)


def _pad(
    sequences: Sequences, signals: Signals, layout: Layout, first: int, last: int, device: torch.device
) -> MicroBatch:
    """Build the micro-batch of rows ``first`` to ``last`` (exclusive)."""
    shape = (last - first, max(1, int(layout.lengths_R[first])))
    mine_S = np.flatnonzero((layout.row_S >= first) & (layout.row_S < last))
    token_T = _ranges(sequences.starts_S[mine_S], sequences.lengths_S[mine_S])
    sequence_T = np.repeat(mine_S, sequences.lengths_S[mine_S])
    cell_T = (layout.row_S[sequence_T] - first) * shape[1] + layout.column_T[token_T]
    forwarded = layout.column_T[token_T] >= 0
    inputs_RL = np.zeros(shape, np.int64)
    inputs_RL.flat[cell_T[forwarded]] = sequences.tokens_T[token_T[forwarded]]

    index_M = _ranges(sequences.firsts_S[mine_S], sequences.trained_S[mine_S])
    token_M, sequence_M = sequences.token_M[index_M], sequences.sequence_M[index_M]
    # a token is predicted where the one before it was read
    source_M = (layout.row_S[sequence_M] - first) * shape[1] + layout.column_T[token_M - 1]
    base = int(sequences.tokens_T.max()) + 1
    distinct_N, reads_M = np.unique(source_M * base + sequences.tokens_T[token_M], return_inverse=True)
    present_S, sequence_here_M = np.unique(sequence_M, return_inverse=True)
    arrays = {
        "inputs_RL": inputs_RL,
        "source_N": distinct_N // base,
        "targets_N": distinct_N % base,
        "reads_M": reads_M,
        "index_M": index_M,
        "sequence_M": sequence_here_M,
        "behaviour_logprobs_M": sequences.behaviour_logprobs_M[index_M],
        "sequence_lengths_M": sequences.trained_S[sequence_M].astype(np.float32),
        "ages_M": sequences.ages_M[index_M],
    }
    if layout.trees:
        depth_T = token_T - sequences.starts_S[sequence_T]
        positions_RL, parents_RL = np.zeros(shape, np.int64), np.full(shape, -1)
        positions_RL.flat[cell_T[forwarded]] = depth_T[forwarded]
        below = np.flatnonzero(forwarded & (depth_T > 0))
        parents_RL.flat[cell_T[below]] = layout.column_T[token_T[below] - 1]
        arrays |= {"positions_RL": positions_RL, "visible_RLL": ancestors(parents_RL)}
    tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    known = {name: part[index_M].to(device) for name, part in signals.known.items()}
    return MicroBatch(**tensors, **known, num_sequences=len(present_S))


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """Concatenation of ``arange(start, start + length)``."""
    before = np.cumsum(lengths) - lengths
    joined: Ints = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
    return joined


def make_filler(known: Collection[str], device: torch.device) -> MicroBatch:
    """One token that a rank forwards for nothing, because others have a micro-batch that it has not.

    Args:
        known: names of the signals of the real ones: what is known there is not forwarded here, either.
        device: where the tensors go.
    """
    return _zeros(1, known, device)


def _zeros(count: int, known: Collection[str], device: torch.device) -> MicroBatch:
    """No token, or one, of which all signals are zero and which counts for no sequence."""
    whole, real = torch.zeros(count, dtype=torch.int64, device=device), torch.zeros(count, device=device)
    return MicroBatch(
        inputs_RL=whole.view(count, count),
        source_N=whole,
        targets_N=whole,
        reads_M=whole,
        index_M=whole,
        sequence_M=whole,
        num_sequences=0,
        behaviour_logprobs_M=real,
        sequence_lengths_M=torch.ones_like(real),
        ages_M=whole,
        **dict.fromkeys(known, real),
    )
