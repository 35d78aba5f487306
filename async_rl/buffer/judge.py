"""Does a submitted group keep the promise of its ticket, and is it worth training on? Pure checks, no state."""

from __future__ import annotations

import numpy as np

from async_rl.buffer.records import Answer, Entry, Rules
from async_rl.data import REQUIRED_TOKEN_FIELDS, Group


def judge(group: Group, entry: Entry, rules: Rules, newest_version: int) -> Answer:
    """Accept, filter (fine but useless: a fresh ordinal replaces it) or refuse (wrong: the ordinal is tried again).

    Args:
        group: what was submitted.
        entry: the open attempt that it answers.
        rules: of the run.
        newest_version: the newest published version; no token can carry a newer one.
    """
    arrays = group.arrays
    if not all(name in arrays for name in REQUIRED_TOKEN_FIELDS):
        return Answer("refused", "missing_array", fresh=True)
    is_sampled = arrays["versions"] >= 0
    sampled = arrays["versions"][is_sampled]
    if len(group) != rules.group_size:
        return Answer("refused", "wrong_group_size", fresh=True)
    if group.task_index != entry.task_index:
        return Answer("refused", "wrong_task", fresh=True)
    if sampled.size == 0:
        return Answer("refused", "nothing_sampled", fresh=True)
    if int(sampled.max()) > newest_version:
        return Answer("refused", "version_from_the_future", fresh=True)
    if int(sampled.min()) < entry.version:
        return Answer("refused", "version_older_than_ticket", fresh=True)
    if not np.array_equal(is_sampled, arrays["loss_mask"] == 1):
        return Answer("refused", "mask_contradicts_versions", fresh=True)
    if not np.isfinite(arrays["logprobs"]).all():
        return Answer("refused", "bad_logprobs", fresh=True)
    if not np.isfinite(group.rewards).all():
        return Answer("filtered", "bad_reward", fresh=True)
    if rules.replace_zero_variance and bool((group.rewards == group.rewards[0]).all()):
        return Answer("filtered", "zero_variance", fresh=True)
    return Answer("accepted", fresh=True)
