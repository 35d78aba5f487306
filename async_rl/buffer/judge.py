"""Does a submitted group keep the promise of its ticket, and is it worth training on? Pure checks, no state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from async_rl.buffer.records import Answer, Entry, Rules
from async_rl.data import REQUIRED_TOKEN_FIELDS, Group

LOGPROBS = (-80.0, 0.01)
"""A token that was sampled has a log-probability between these: none is drawn with probability e^-80, whose ratio would
overflow float32, and rounding carries none further above 0."""


def judge(group: Group, entry: Entry, rules: Rules, newest_version: int) -> Answer:
    """Accept, filter (fine but useless: a fresh ordinal replaces it) or refuse (wrong: the ordinal is tried again).

    Whatever is accepted can be trained: no actor can bring the learner down.

    Args:
        group: what was submitted.
        entry: the open attempt that it answers.
        rules: of the run.
        newest_version: the newest published version; no token can carry a newer one.
    """
    if not all(name in group.arrays for name in REQUIRED_TOKEN_FIELDS):
        return Answer("refused", "missing_array", fresh=True)
    reason = _broken_promise(group, entry, rules, newest_version) or _untrainable(group, rules)
    if reason:
        return Answer("refused", reason, fresh=True)
    if "reward" in rules.stages:
        return Answer("accepted", fresh=True)
    return replace(judge_rewards(group.rewards, rules), fresh=True)


def judge_rewards(rewards: npt.NDArray[np.float32], rules: Rules) -> Answer:
    """The same for the rewards ``[G]`` alone, as soon as they are known: accept or filter."""
    if not np.isfinite(rewards).all():
        return Answer("filtered", "bad_reward")
    if rules.replace_zero_variance and bool((rewards == rewards[0]).all()):
        return Answer("filtered", "zero_variance")
    return Answer("accepted")


def _broken_promise(group: Group, entry: Entry, rules: Rules, newest_version: int) -> str:
    """What is not as the ticket says; empty if all is."""
    is_sampled = group.arrays["versions"] >= 0
    sampled = group.arrays["versions"][is_sampled]
    if len(group) != rules.group_size:
        return "wrong_group_size"
    if group.task_index != entry.task_index:
        return "wrong_task"
    if sampled.size == 0:
        return "nothing_sampled"
    if int(sampled.max()) > newest_version:
        return "version_from_the_future"
    if int(sampled.min()) < entry.version:
        return "version_older_than_ticket"
    if not np.array_equal(is_sampled, group.arrays["loss_mask"] == 1):
        return "mask_contradicts_versions"
    return ""


def _untrainable(group: Group, rules: Rules) -> str:
    """What the learner could not compute with; empty if all is well."""
    mask, tokens = group.arrays["loss_mask"], group.arrays["tokens"]
    lengths_S = np.asarray(group.lengths)
    starts_S = np.cumsum(lengths_S) - lengths_S
    sampled_S = np.add.reduceat(mask, starts_S, dtype=np.int64)
    if not sampled_S.all():
        return "nothing_sampled"
    if mask[starts_S].any():
        return "no_prompt"
    if rules.max_new_tokens is not None and sampled_S.max() > rules.max_new_tokens:
        return "too_many_tokens"
    if rules.context is not None and lengths_S.max() > rules.context:
        return "too_long"
    if tokens.min() < 0 or (rules.vocabulary is not None and tokens.max() >= rules.vocabulary):
        return "token_outside_vocabulary"
    logprobs = group.arrays["logprobs"][mask == 1]
    if not ((logprobs >= LOGPROBS[0]) & (logprobs <= LOGPROBS[1])).all():  # NaN is in no range
        return "bad_logprobs"
    return ""
