"""What was answered to each attempt, so that a repeated message gets the same answer and counts nothing."""

from __future__ import annotations

from dataclasses import replace

from async_rl.buffer.records import Answer

REMEMBERED = 65_536


class Answers:
    """Answers by (ordinal, attempt); the oldest are forgotten beyond ``REMEMBERED``."""

    def __init__(self) -> None:
        self._by_attempt: dict[tuple[int, int], Answer] = {}

    def put(self, attempt: tuple[int, int], answer: Answer) -> None:
        """Remember; give it with ``fresh = True`` when the holder has not heard it yet."""
        if len(self._by_attempt) >= REMEMBERED:
            del self._by_attempt[next(iter(self._by_attempt))]
        self._by_attempt[attempt] = answer

    def take(self, attempt: tuple[int, int]) -> Answer | None:
        """The answer, ``fresh`` at most once."""
        answer = self._by_attempt.get(attempt)
        if answer is not None and answer.fresh:
            self._by_attempt[attempt] = replace(answer, fresh=False)
        return answer
