"""Failures in a row: single ones belong to a long run, many one after the other mean that a part is broken."""

from __future__ import annotations

from async_rl.client import Client

MAX_FAILURES = 16


class Streak:
    """Counts failures in a row; :data:`MAX_FAILURES` of them end the run, which says why.

    Args:
        client: tells the server.
        sentence: what so many of them mean.
    """

    def __init__(self, client: Client, sentence: str) -> None:
        self._client, self._sentence = client, sentence
        self._length = 0

    def add(self, reason: str, detail: str) -> None:
        """One more.

        Args:
            reason: slug of the last one.
            detail: what is known about it.
        """
        self._length += 1
        if self._length == MAX_FAILURES:
            self._client.send("fatal", reason=f"{self._sentence} ({reason}); the last: {detail}")

    def clear(self) -> None:
        """Something went well."""
        self._length = 0


def is_useful(outcome: str, reason: str) -> bool:
    """Whether the server could use what it acknowledged; that all rewards are equal is no fault of the sender's."""
    return outcome == "accepted" or (outcome, reason) == ("filtered", "zero_variance")
