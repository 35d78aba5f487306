"""From a value per token to one number, over the counts of the *global* mini-batch."""

from __future__ import annotations

from typing import Literal

import torch

Aggregation = Literal["token", "sequence", "constant"]


def aggregate(
    values_M: torch.Tensor,
    sequence_lengths_M: torch.Tensor,
    aggregation: Aggregation,
    num_tokens: int,
    num_sequences: int,
    longest: int,
) -> torch.Tensor:
    """Part of the mean over the global mini-batch; the parts of all ranks and micro-batches add up to it.

        token:     sum_t x_t / num_tokens                      (DAPO, arXiv:2503.14476, eq. 12)
        sequence:  sum_i mean_t(x_it) / num_sequences          (GRPO, arXiv:2402.03300, eq. 3)
        constant:  sum_t x_t / (num_sequences · longest)       (Dr.GRPO, arXiv:2503.20783, section 3.2)

    Args:
        values_M: ``[M]``.
        sequence_lengths_M: number of trained tokens of the sequence that each token belongs to, ``[M]``.
        aggregation: which mean.
        num_tokens: trained tokens of the mini-batch over all ranks.
        num_sequences: sequences of the mini-batch over all ranks.
        longest: most tokens that one sequence can have.

    Returns:
        Scalar ``[]``.
    """
    if aggregation == "token":
        return values_M.sum() / num_tokens
    if aggregation == "sequence":
        return (values_M / sequence_lengths_M).sum() / num_sequences
    return values_M.sum() / (num_sequences * longest)
