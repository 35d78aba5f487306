"""A string of bytes as a source of decisions: who makes the bytes (chance, hypothesis, coverage) steers the fuzzing.

bytes 3, 1, 1 ─► below(10) = 3, below(300) = 257          all used up: 0 from then on
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Reads decisions off ``data``.

    Args:
        data: each decision takes as many bytes as it has to.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def spent(self) -> bool:
        """Whether all bytes are used up."""
        return self._at >= len(self._data)

    def below(self, most: int) -> int:
        """A whole number from 0 to ``most - 1``; 0 when the bytes are used up."""
        if most <= 1:
            return 0
        size = ((most - 1).bit_length() + 7) // 8
        raw = int.from_bytes(self._data[self._at : self._at + size], "little")
        self._at += size
        return raw % most

    def pick(self, options: Sequence[T]) -> T:
        """One of ``options``, the first when the bytes are used up."""
        return options[self.below(len(options))]

    def blob(self, most: int) -> bytes:
        """Up to ``most`` bytes as they are."""
        size = self.below(most + 1)
        found = self._data[self._at : self._at + size]
        self._at += size
        return found
