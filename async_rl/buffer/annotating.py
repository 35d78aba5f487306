"""What the stages add to a group: what is missing, whether an addition fits, the group with it. Pure.

submitted group ─ blank ─► awaited stages ─► annotation ─ fault? ─► merged group        (groups never change: new ones)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from async_rl.data import Annotation, Group

REF_LOGPROBS = (-1e4, 0.01)
"""A frozen model may find a sampled token very unlikely, but not impossible; rounding carries none further above 0."""


def blank(group: Group, stages: tuple[str, ...]) -> Group:
    """The group without what only stages add, so that what is there tells what is still awaited."""
    if "reward" in stages:
        group = replace(group, rewards=np.full(len(group), np.nan, np.float32))
    return without_reference(group)


def without_reference(group: Group) -> Group:
    """The group without the reference's log-probabilities."""
    if "ref_logprobs" not in group.arrays:
        return group
    return replace(group, arrays={k: v for k, v in group.arrays.items() if k != "ref_logprobs"})


def awaited(group: Group, stages: tuple[str, ...]) -> tuple[str, ...]:
    """Those of ``stages`` that have not annotated the group yet."""
    missing = {"reward": not np.isfinite(group.rewards).all(), "reference": "ref_logprobs" not in group.arrays}
    return tuple(stage for stage in stages if missing[stage])


def fault(annotation: Annotation, group: Group) -> str:
    """Why the annotation cannot be merged into the group; empty if it can. NaN rewards are no fault, but filtered."""
    if annotation.stage == "reward":
        return "" if annotation.values.shape == group.rewards.shape else "wrong_group_size"
    if annotation.values.shape != group.arrays["tokens"].shape:
        return "wrong_length"
    sampled = annotation.values[group.arrays["loss_mask"] == 1]
    low, high = REF_LOGPROBS
    return "" if ((sampled >= low) & (sampled <= high)).all() else "bad_ref_logprobs"  # NaN is in no range


def merged(group: Group, annotation: Annotation) -> Group:
    """The group with a faultless annotation added; 0 where nothing was sampled."""
    if annotation.stage == "reward":
        return replace(group, rewards=annotation.values)
    values = np.where(group.arrays["loss_mask"] == 1, annotation.values, np.float32(0))
    return replace(group, arrays={**group.arrays, "ref_logprobs": values})
