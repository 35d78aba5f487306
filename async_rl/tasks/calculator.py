"""Calculator: ``12+34*56=`` is answered by ``1916``, with a tool that computes what stands in brackets."""

from __future__ import annotations

import random
from collections.abc import Iterator

from async_rl.tasks.countdown import ExpressionError, evaluate
from async_rl.tasks.problem import Problem

_DRAWS = 20_000
_OPERANDS = 3
ERROR = "error"
"""What the tool answers when it cannot read the expression."""


def problems(digits: int) -> Iterator[tuple[object, Problem]]:
    """Draw expressions of three operands of exactly ``digits`` digits with ``+``, ``-`` and ``*``.

    Yields:
        ``(key, problem)``: expressions of the same operands in another order share a key.
    """
    low, high = (10 ** (digits - 1) if digits > 1 else 0), 10**digits
    rng = random.Random(f"calculator-{digits}")
    drawn = ((rng.choices(range(low, high), k=_OPERANDS), rng.choices("+-*", k=_OPERANDS - 1)) for _ in range(_DRAWS))
    seen: set[str] = set()
    for numbers, operators in drawn:
        text = "".join(f"{n}{o}" for n, o in zip(numbers, [*operators, ""], strict=True))
        if text not in seen:
            seen.add(text)
            yield tuple(sorted(numbers)), Problem(prompt=f"{text}=", columns={"answer": compute(text)})


def compute(expression: str) -> str:
    """The value of an expression of numbers, ``+ - * /`` and parentheses, exactly; ``error`` if it is none.

    Parsed by :func:`async_rl.tasks.countdown.evaluate`, which bounds its size; nothing is ever executed.
    """
    try:
        return str(evaluate(expression)[0])
    except ExpressionError:
        return ERROR
