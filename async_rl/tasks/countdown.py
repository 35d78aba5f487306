"""Countdown: make the target from the given numbers, each used exactly once, with ``+ - * /`` and parentheses.

expression = term   { ("+" | "-") term }          evaluated with exact fractions by our own parser,
term       = factor { ("*" | "/") factor }        never by eval(): an answer is text from a model
factor     = number | "(" expression ")"
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

from async_rl.errors import ConfigError
from async_rl.tasks.problem import Problem

VERIFIER = "async_rl.tasks.countdown:score"

_DRAWS = 20_000
_LARGEST_NUMBER = 20
_LARGEST_TARGET = 999
_MAX_CHARACTERS = 200
_MAX_DEPTH = 20
_TOKEN = re.compile(r"(0|[1-9][0-9]{0,8})(?![0-9])|[-+*/()]", re.ASCII)


class ExpressionError(ValueError):
    """The text is no expression of the grammar, or divides by zero."""


def problems(count: int) -> Iterator[tuple[object, Problem]]:
    """Make problems with ``count`` numbers from 1 to 20 and a whole, positive target that they can make.

    Yields:
        ``(key, problem)`` with the columns ``numbers`` and ``target``; problems of the same numbers and target are one.

    Raises:
        ConfigError: one number makes nothing but itself.
    """
    if count < 2:
        raise ConfigError(f"task.digits = {count}: countdown needs at least 2 numbers")
    rng = random.Random(f"countdown-{count}")
    seen = set()
    for _ in range(_DRAWS):
        numbers = [rng.randint(1, _LARGEST_NUMBER) for _ in range(count)]
        target = _random_value(numbers, rng)
        key = (tuple(sorted(numbers)), target)
        if target is None or key in seen:
            continue
        seen.add(key)
        prompt = f"Use {' '.join(map(str, numbers))} to make {target}: "
        yield key, Problem(prompt=prompt, columns={"numbers": numbers, "target": target})


def score(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    numbers: Sequence[Sequence[int]],
    target: Sequence[int],
    finish_reasons: Sequence[str],
    **_: object,
) -> list[float]:
    """1.0 for a finished expression that uses each number exactly once and equals the target, else 0.0."""
    return [
        float(reason == "stop" and solves(text, given, goal))
        for text, given, goal, reason in zip(completions, numbers, target, finish_reasons, strict=True)
    ]


def solves(text: str, numbers: Sequence[int], target: int) -> bool:
    """Whether ``text`` is an expression of exactly these numbers with this value."""
    try:
        value, used = evaluate(text)
    except ExpressionError:
        return False
    return sorted(used) == sorted(numbers) and value == target


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Compute the value of an expression and the numbers in it, in order.

    Raises:
        ExpressionError: not of the grammar, longer than 200 characters, nested deeper than 20, or a division by zero.
    """
    return _Parser(_tokens(text)).parse()


def _tokens(text: str) -> list[str]:
    if len(text) > _MAX_CHARACTERS:
        raise ExpressionError(f"{len(text)} characters")
    tokens, position = [], 0
    while position < len(text):
        if text[position] in " \n":
            position += 1
            continue
        match = _TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"unexpected {text[position]!r}")
        tokens.append(match.group())
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent over a bounded list of tokens; each method returns the value of what it consumed."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0
        self._used: list[int] = []

    def parse(self) -> tuple[Fraction, list[int]]:
        value = self._expression(0)
        if self._next != len(self._tokens):
            raise ExpressionError(f"unexpected {self._tokens[self._next]!r}")
        return value, self._used

    def _take(self, *accepted: str) -> str | None:
        if self._next < len(self._tokens) and self._tokens[self._next] in accepted:
            self._next += 1
            return self._tokens[self._next - 1]
        return None

    def _expression(self, depth: int) -> Fraction:
        value = self._term(depth)
        while operator := self._take("+", "-"):
            right = self._term(depth)
            value = value + right if operator == "+" else value - right
        return value

    def _term(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while operator := self._take("*", "/"):
            right = self._factor(depth)
            if operator == "/" and right == 0:
                raise ExpressionError("division by zero")
            value = value * right if operator == "*" else value / right
        return value

    def _factor(self, depth: int) -> Fraction:
        if self._take("("):
            if depth == _MAX_DEPTH:
                raise ExpressionError("nested too deeply")
            value = self._expression(depth + 1)
            if not self._take(")"):
                raise ExpressionError("missing )")
            return value
        if self._next == len(self._tokens) or not self._tokens[self._next].isdigit():
            raise ExpressionError("a number is missing")
        number = int(self._tokens[self._next])
        self._next += 1
        self._used.append(number)
        return Fraction(number)


def _random_value(numbers: Sequence[int], rng: random.Random) -> int | None:
    """Combine the numbers in random order by random operators; None unless that gives a target that we may ask for."""
    values = [Fraction(n) for n in numbers]
    while len(values) > 1:
        left = values.pop(rng.randrange(len(values)))
        right = values.pop(rng.randrange(len(values)))
        operator = rng.choice("+-*/")
        if operator == "/" and right == 0:
            return None
        values.append(
            {"+": left + right, "-": left - right, "*": left * right, "/": left / right if right else left}[operator]
        )
    value = values[0]
    return int(value) if value.denominator == 1 and 1 <= value <= _LARGEST_TARGET else None
