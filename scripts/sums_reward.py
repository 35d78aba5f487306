"""The reward of scripts/compare_trl.py: 1 for the right sum, a little for each right digit. Imports nothing.

Ours calls it as ``task.verifier = "sums_reward:score"``, TRL's side as a function; both get the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

PARTIAL = 0.2
"""Reward of an answer whose characters are all right, but which did not end there."""


def reward(completion: str, answer: str, ended: bool) -> float:
    """1 if the model wrote just ``answer`` and ended, else :data:`PARTIAL` times the share of right positions."""
    if ended and completion == answer:
        return 1.0
    longest = max(len(completion), len(answer), 1)
    return PARTIAL * sum(a == b for a, b in zip(completion, answer, strict=False)) / longest


def score(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    answer: Sequence[str],
    finish_reasons: Sequence[str],
    **_: object,
) -> list[float]:
    """The same in the form of a verifier."""
    reasons = [reason == "stop" for reason in finish_reasons]
    return [reward(text, right, ended) for text, right, ended in zip(completions, answer, reasons, strict=True)]
