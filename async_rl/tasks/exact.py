"""Exact match: the answer, the whole answer and nothing but the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

VERIFIER = "async_rl.tasks.exact:score"


def score(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    answer: Sequence[Any],
    finish_reasons: Sequence[str],
    **_: object,
) -> list[float]:
    """1.0 where the stripped completion equals ``str(answer)`` and the model itself ended it, else 0.0.

    A completion that was cut at its length is wrong even when the text so far is right: the model had not finished.
    """
    return [
        float(reason == "stop" and text.strip() == str(right).strip())
        for text, right, reason in zip(completions, answer, finish_reasons, strict=True)
    ]
