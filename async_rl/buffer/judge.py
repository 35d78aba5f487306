"""Does a submitted group keep the promise of its ticket, and is it worth training on? Pure checks, no state.

group ─► ticket ─► what the learner needs (tokens: here; control: control_rules.py) ─► versions ─► rewards ─► Answer
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from async_rl.buffer.control_rules import control_fault
from async_rl.buffer.records import Answer, Entry, Rules
from async_rl.data import REQUIRED_TOKEN_FIELDS, TOKEN_FIELDS, Group

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
        newest_version: the newest published version; nothing can carry a newer one.
    """
    reason = _other_ticket(group, entry, rules)
    if not reason and rules.control is not None:
        reason = control_fault(group, rules.control) or _wrong_versions(group, entry, newest_version)
    elif not reason:
        reason = _token_fault(group, entry, rules, newest_version)
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


def _other_ticket(group: Group, entry: Entry, rules: Rules) -> str:
    """What is not as the ticket says; empty if all is."""
    if len(group) != rules.group_size:
        return "wrong_group_size"
    return "" if group.task_index == entry.task_index else "wrong_task"


def _wrong_versions(group: Group, entry: Entry, newest_version: int) -> str:
    """Versions that cannot be, of an integer array; empty if all is well."""
    versions = group.arrays["versions"]
    sampled = versions[versions >= 0]
    if sampled.size == 0:
        return "nothing_sampled"
    if int(sampled.max()) > newest_version:
        return "version_from_the_future"
    return "version_older_than_ticket" if int(sampled.min()) < entry.version else ""


def _token_fault(group: Group, entry: Entry, rules: Rules, newest_version: int) -> str:
    """What is wrong with a group of token sequences; empty if all is well."""
    if not all(name in group.arrays for name in REQUIRED_TOKEN_FIELDS):
        return "missing_array"
    reason = _wrong_versions(group, entry, newest_version)
    if reason:
        return reason
    if not TOKEN_FIELDS.keys() >= group.arrays.keys():
        return "unknown_array"
    if not np.array_equal(group.arrays["versions"] >= 0, group.arrays["loss_mask"]):  # so it is 0 or 1, too
        return "mask_contradicts_versions"
    return _untrainable(group, rules)


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
