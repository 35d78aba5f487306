"""Addition: ``12+34=`` is answered by ``46``."""

from __future__ import annotations

import random
from collections.abc import Iterator

from async_rl.tasks.problem import Problem

_SAMPLED_PAIRS = 20_000


def problems(digits: int) -> Iterator[tuple[object, Problem]]:
    """List sums of two operands of exactly ``digits`` digits: all up to two digits, 20,000 sampled ones above.

    Yields:
        ``(key, problem)``: a sum and the one with its operands swapped share a key.
    """
    low = 10 ** (digits - 1) if digits > 1 else 0
    high = 10**digits
    if digits <= 2:
        pairs = [(a, b) for a in range(low, high) for b in range(low, high)]
    else:
        rng = random.Random(f"addition-{digits}")
        drawn = ((rng.randrange(low, high), rng.randrange(low, high)) for _ in range(_SAMPLED_PAIRS))
        pairs = list(dict.fromkeys(drawn))
    for a, b in pairs:
        yield (min(a, b), max(a, b)), Problem(prompt=f"{a}+{b}=", columns={"answer": str(a + b)})
