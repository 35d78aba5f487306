"""Guess: ``guess 12-26: `` is answered by numbers until one is the secret; each is told ``higher`` or ``lower``."""

from __future__ import annotations

from collections.abc import Iterator

from async_rl.tasks.problem import Problem

SPAN = 15
"""Numbers in a range: the most that halving finds within four answers."""
_LOWS = range(10, 85)
HIGHER, LOWER, JUNK = "higher", "lower", "number?"


def problems() -> Iterator[tuple[object, Problem]]:
    """List every secret of every range of 15 two-digit numbers.

    Yields:
        ``(key, problem)``: each for itself.
    """
    for low in _LOWS:
        for secret in range(low, low + SPAN):
            prompt = f"guess {low}-{low + SPAN - 1}: "
            yield (low, secret), Problem(prompt=prompt, columns={"low": low, "secret": secret})


def hint(text: str, secret: int) -> str:
    """What a guess is told; empty if it is right."""
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 4):
        return JUNK
    guess = int(text)
    return "" if guess == secret else HIGHER if guess < secret else LOWER
