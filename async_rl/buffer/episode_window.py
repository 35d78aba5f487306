"""The last episodes of all actors, and how many there were: what users of robot learning look at.

accepted group ─► returns [E], lengths [E] ─► the newest 100 ─► mean return, mean length; number of all
"""

from __future__ import annotations

from collections import deque
from typing import Any

from async_rl.data import Array

SIZE = 100
"""Episodes that the means are taken over."""


class EpisodeWindow:
    """Episodes in the order in which their groups were accepted."""

    def __init__(self) -> None:
        self.count = 0
        """Episodes that have ended so far."""
        self._returns: deque[float] = deque(maxlen=SIZE)
        self._lengths: deque[float] = deque(maxlen=SIZE)

    def add(self, returns: Array, lengths: Array) -> None:
        """Take in episodes: sums of rewards [E] and steps [E]."""
        self.count += len(returns)
        self._returns.extend(returns[-SIZE:].tolist())
        self._lengths.extend(lengths[-SIZE:].tolist())

    @property
    def mean_return(self) -> float | None:
        """Over the window; None before the first episode."""
        return sum(self._returns) / len(self._returns) if self._returns else None

    @property
    def mean_length(self) -> float | None:
        """Over the window; None before the first episode."""
        return sum(self._lengths) / len(self._lengths) if self._lengths else None

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"count": self.count, "returns": list(self._returns), "lengths": list(self._lengths)}

    def restore(self, plain: dict[str, Any]) -> None:
        """Go on from :meth:`to_plain`."""
        self.count = int(plain["count"])
        self._returns.extend(float(value) for value in plain["returns"])
        self._lengths.extend(float(value) for value in plain["lengths"])
