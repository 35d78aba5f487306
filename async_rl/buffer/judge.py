"""Does a submitted group keep the promise of its ticket, and is it worth training on? Pure checks, no state.

group ─► ticket ─► what the learner needs (tokens: here; control: control_rules.py) ─► versions ─► rewards ─► Answer
"""

from __future__ import annotations

from itertools import accumulate
from math import isfinite

import numpy as np
import numpy.typing as npt

from async_rl.buffer.control_rules import control_fault
from async_rl.buffer.records import Answer, Entry, Rules
from async_rl.data import REQUIRED_TOKEN_FIELDS, TOKEN_FIELDS, Group, largest, smallest

_REQUIRED, _KNOWN = frozenset(REQUIRED_TOKEN_FIELDS), frozenset(TOKEN_FIELDS)
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
    return judge_rewards(group.rewards, rules).with_fresh(True)


def judge_rewards(rewards: npt.NDArray[np.float32], rules: Rules) -> Answer:
    """The same for the rewards ``[G]`` alone, as soon as they are known: accept or filter."""
    if not all(map(isfinite, rewards.tolist())):
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
    if group.newest_version < 0:
        return "nothing_sampled"
    if group.newest_version > newest_version:
        return "version_from_the_future"
    return "version_older_than_ticket" if group.oldest_version < entry.version else ""


def _token_fault(group: Group, entry: Entry, rules: Rules, newest_version: int) -> str:
    """What is wrong with a group of token sequences; empty if all is well."""
    if not group.arrays.keys() >= _REQUIRED:
        return "missing_array"
    reason = _wrong_versions(group, entry, newest_version)
    if reason:
        return reason
    if not group.arrays.keys() <= _KNOWN:
        return "unknown_array"
    if (group.arrays["versions"] >= 0).tobytes() != group.arrays["loss_mask"].tobytes():  # so it is 0 or 1, too
        return "mask_contradicts_versions"
    return _untrainable(group, rules)


def _untrainable(group: Group, rules: Rules) -> str:
    """What the learner could not compute with; empty if all is well."""
    mask, tokens = group.arrays["loss_mask"], group.arrays["tokens"]
    starts_S = list(accumulate(group.lengths[:-1], initial=0))
    # of one sequence all is counted at once, in a fifth of the time
    sampled_S = np.add.reduceat(mask, starts_S, dtype=np.int64).tolist() if len(group) > 1 else [np.count_nonzero(mask)]
    if not all(sampled_S):
        return "nothing_sampled"
    if any(mask[starts_S].tolist()):
        return "no_prompt"
    if rules.max_new_tokens is not None and max(sampled_S) > rules.max_new_tokens:
        return "too_many_tokens"
    if rules.context is not None and max(group.lengths) > rules.context:
        return "too_long"
    # without a sign a negative id is larger than all others
    if largest(tokens.view(np.uint32)) >= (rules.vocabulary or 1 << 31):
        return "token_outside_vocabulary"
    return "" if _in_range(group.arrays["logprobs"], mask) else "bad_logprobs"


def _in_range(logprobs: npt.NDArray[np.float32], mask: npt.NDArray[np.uint8]) -> bool:
    """Whether what the mask leaves of the log-probabilities is in :data:`LOGPROBS`; NaN is in no range."""
    if smallest(logprobs) >= LOGPROBS[0] and largest(logprobs) <= LOGPROBS[1]:  # mostly all of them are
        return True
    left = logprobs[mask == 1]
    return bool(((left >= LOGPROBS[0]) & (left <= LOGPROBS[1])).all())
