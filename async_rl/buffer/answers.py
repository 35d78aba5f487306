"""What was answered about each attempt, so that a repeated message gets the same answer and counts nothing."""

from __future__ import annotations

from collections import OrderedDict

from async_rl.buffer.records import Answer

REMEMBERED = 65_536
Key = tuple[int | str, ...]
"""Ordinal and attempt, and who is answered where several may ask."""


class Answers:
    """Answers by key; the oldest are forgotten beyond ``REMEMBERED``."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Key, Answer] = OrderedDict()
        """Its first is found at once; in a dict each that was deleted before it is passed over."""

    def put(self, key: Key, answer: Answer) -> None:
        """Remember; give it with ``fresh = True`` when the holder has not heard it yet."""
        if len(self._by_key) >= REMEMBERED:
            self._by_key.popitem(last=False)
        self._by_key[key] = answer

    def take(self, key: Key) -> Answer | None:
        """The answer, ``fresh`` at most once."""
        answer = self._by_key.get(key)
        if answer is not None and answer.fresh:
            self._by_key[key] = answer.with_fresh(False)
        return answer

    def forget(self, key: Key) -> None:
        """A new try: the old answer does not hold for it."""
        self._by_key.pop(key, None)
