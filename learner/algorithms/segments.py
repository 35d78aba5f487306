"""Sums and recursions over the tokens of each sequence, for tokens ``[M]`` of several sequences in one flat array.

``sequence_M`` names the sequence of each token, from 0. Tokens of one sequence appear in order of time; those of
different sequences may be interleaved.
"""

from __future__ import annotations

import torch


def sequence_sums(values_M: torch.Tensor, sequence_M: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Sum of each sequence's values, ``[num_sequences]`` in the dtype of the values; 0 for one without tokens."""
    return values_M.new_zeros(num_sequences).index_add(0, sequence_M, values_M)


def discounted_to_go(values_M: torch.Tensor, sequence_M: torch.Tensor, discount: float) -> torch.Tensor:
    """Discounted sum of a token's value and of those after it in its sequence.

        y_t = x_t + discount · y_{t+1}        y after the last token = 0

    Args:
        values_M: ``[M]``.
        sequence_M: int64 ``[M]``.
        discount: between 0 and 1.

    Returns:
        float64 ``[M]``.
    """
    result_M = values_M.double()
    next_M, levels = _from_the_end(sequence_M)
    for level in levels[1:]:  # last tokens are done; then the last but one of every sequence at once, and so on
        result_M[level] += discount * result_M[next_M[level]]
    return result_M


def following(values_M: torch.Tensor, sequence_M: torch.Tensor) -> torch.Tensor:
    """Value of the next token of the same sequence, ``[M]``; 0 at a sequence's last token."""
    next_M, _ = _from_the_end(sequence_M)
    return torch.where(next_M >= 0, values_M[next_M], torch.zeros_like(values_M))


def _from_the_end(sequence_M: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Index of each token's successor (-1: none), and the tokens by their distance from their sequence's end."""
    order_M = sequence_M.argsort(stable=True)
    counts_S = torch.bincount(sequence_M)
    sorted_M = sequence_M[order_M]
    distance_M = counts_S.cumsum(0)[sorted_M] - 1 - torch.arange(len(order_M), device=order_M.device)
    next_M = torch.full_like(order_M, -1)
    inner_M = distance_M > 0
    next_M[order_M[inner_M]] = order_M.roll(-1)[inner_M]
    levels = order_M[distance_M.argsort(stable=True)].split(torch.bincount(distance_M).tolist())
    return next_M, levels
