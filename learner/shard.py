"""A rank's part of a step, as the server delivers it: its groups by mini-batch, and the global counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.data import Group
from async_rl.wire import Frame, decode_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """What one update of this rank trains on, and the global counts that its losses are divided by."""

    groups: Sequence[Group]
    """This rank's share."""
    num_tokens: int
    """Trained tokens over all ranks."""
    num_sequences: int
    """Sequences over all ranks."""
    lengths_per_rank: Sequence[Sequence[int]]
    """Lengths of the sequences that each rank has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What this rank trains in one step."""

    step: int
    mini_batches: tuple[MiniBatch, ...]
    stats: Mapping[str, Any]
    """What the server tells along."""

    @classmethod
    def from_message(cls, header: Mapping[str, Any], frames: Sequence[Frame]) -> Shard:
        """Decode a ``shard`` message; the arrays are views of ``frames``.

        Raises:
            WireError: the groups are malformed.
        """
        groups = decode_groups(dict(header), frames)
        mini_batches = tuple(
            MiniBatch(
                groups=[g for g, of in zip(groups, header["minibatch"], strict=True) if of == index],
                num_tokens=counts["tokens"],
                num_sequences=counts["sequences"],
                lengths_per_rank=lengths_per_rank,
            )
            for index, (counts, lengths_per_rank) in enumerate(zip(header["counts"], header["costs"], strict=True))
        )
        return cls(step=header["step"], mini_batches=mini_batches, stats=header["stats"])
