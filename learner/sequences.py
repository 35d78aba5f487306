"""The sequences of some groups laid end to end, and which of their tokens are trained: the one order that all share.

groups ──► T tokens of S sequences of G groups ──► M trained tokens (loss mask 1), sequence by sequence, in time
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rl.data import Group
from async_rl.errors import AsyncRLError
from learner.layout import Ints

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Plain arrays; nothing in here depends on how tokens are packed into micro-batches."""

    tokens_T: Ints
    lengths_S: Ints
    starts_S: Ints
    """First token of each sequence."""
    group_S: Ints
    """Index of the group of each sequence, from 0."""
    rewards_S: Floats
    """NaN where nothing could score the sequence."""
    trained_S: Ints
    """Trained tokens of each sequence."""
    token_M: Ints
    """Which of the T tokens each trained token is."""
    sequence_M: Ints
    behaviour_logprobs_M: Floats
    ages_M: Ints
    """Version that is trained minus version that sampled."""
    ref_logprobs_M: Floats | None
    """What a reference scorer wrote into the groups; None: nothing."""

    @property
    def firsts_S(self) -> Ints:
        """First trained token of each sequence, as an index over M."""
        return np.cumsum(self.trained_S) - self.trained_S


def concatenate(groups: Sequence[Group], version: int, annotated: bool = False) -> Sequences:
    """Lay ``groups`` end to end.

    Args:
        groups: token groups; may be empty.
        version: version that is trained, for the ages.
        annotated: a scorer has written ``ref_logprobs``, and they are read.

    Raises:
        AsyncRLError: a first token is marked as sampled (nothing could have predicted it), or the annotation is missing
            or not finite; names the groups.
    """

    def joined(name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.concatenate([np.zeros(0, dtype), *(np.asarray(g.arrays[name], dtype) for g in groups)])

    lengths_S = np.asarray([n for g in groups for n in g.lengths], np.int64)
    starts_S = np.cumsum(lengths_S) - lengths_S
    mask_T = joined("loss_mask", np.int64)
    if mask_T[starts_S].any():
        bad = [g.ordinal for g in groups if any(t.loss_mask[0] for t in g.trajectories)]
        raise AsyncRLError(f"groups {bad[:5]}: the first token is marked as sampled, but no token came before it")
    if annotated:
        _check_annotation(groups)
    sequence_T = np.repeat(np.arange(len(lengths_S)), lengths_S)
    token_M = np.flatnonzero(mask_T)
    return Sequences(
        tokens_T=joined("tokens", np.int64),
        lengths_S=lengths_S,
        starts_S=starts_S,
        group_S=np.repeat(np.arange(len(groups)), [len(g) for g in groups]),
        rewards_S=np.concatenate([np.zeros(0, np.float32), *(g.rewards for g in groups)]),
        trained_S=np.bincount(sequence_T[token_M], minlength=len(lengths_S)),
        token_M=token_M,
        sequence_M=sequence_T[token_M],
        behaviour_logprobs_M=joined("logprobs", np.float32)[token_M],
        ages_M=version - joined("versions", np.int64)[token_M],
        ref_logprobs_M=joined("ref_logprobs", np.float32)[token_M] if annotated else None,
    )


def _check_annotation(groups: Sequence[Group]) -> None:
    def is_whole(group: Group) -> bool:
        annotation = group.arrays.get("ref_logprobs")
        return annotation is not None and bool(np.isfinite(annotation[group.arrays["loss_mask"] == 1]).all())

    if bad := [g.ordinal for g in groups if not is_whole(g)]:
        raise AsyncRLError(
            f"groups {bad[:5]}: the reference's log-probabilities are missing or not finite; with "
            "reference.placement = 'scorer' the scorers of the stage 'reference' write them: check their logs and model"
        )
