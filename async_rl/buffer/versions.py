"""The versions of the weights as the server sees them: announced, proven by checksum, late.

trained(manifest) ─► announce ─► clients prepare, commit ─► live(version, checksum) ─► equal? ─► counts
                                      └─ not within the deadline ─► fenced: no tickets until it has caught up
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from async_rl.config import RunConfig
from async_rl.evaluation import is_evaluated
from async_rl.weights.manifest import Manifest

_KEPT = 4096


@dataclass(slots=True)
class Mean:
    """Running mean."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Take one more value."""
        self.total += value
        self.count += 1

    @property
    def value(self) -> float | None:
        """``None`` before the first."""
        return self.total / self.count if self.count else None


class Versions:
    """Announced versions.

    Args:
        config: the deadline in which an actor must have committed an announced version (or a newer one), and which
            versions are evaluated.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._deadline_s = config.weights.commit_deadline_s
        self._announced: dict[int, tuple[float, str]] = {}
        self.newest: Manifest | None = None
        self.wire: dict[str, Any] | None = None
        """The newest manifest as plain types."""
        self.evaluated_wire: dict[str, Any] | None = None
        """The newest one that is to be evaluated: what an evaluator that joins late begins with."""
        self.start: int | None = None
        """The first version of the run, or of its resumption."""
        self.count = 0
        self.mismatches = 0
        """Times that a client claimed a version whose bytes it does not hold."""
        self._publish_s, self._transfer_s, self._commit_s = Mean(), Mean(), Mean()
        self._pauses_s: deque[float] = deque(maxlen=_KEPT)
        self._paused_s = 0.0

    def announce(self, manifest: Manifest, now: float, publish_s: float | None) -> None:
        """A new version is published."""
        self.newest, self.wire = manifest, manifest.to_wire()
        self.start = manifest.version if self.start is None else self.start
        if is_evaluated(self._config, manifest.version, self.start):
            self.evaluated_wire = self.wire
        self._announced[manifest.version] = (now, manifest.checksum)
        if len(self._announced) > _KEPT:
            del self._announced[next(iter(self._announced))]
        self.count += 1
        if publish_s is not None:
            self._publish_s.add(publish_s)

    def proves(self, version: int, checksum: str) -> bool:
        """Whether these are the bytes that were published as ``version``; a mismatch is counted."""
        announced = self._announced.get(version)
        proven = announced is not None and announced[1] == checksum
        self.mismatches += not proven
        return proven

    def time_commit(self, transfer_s: float, commit_s: float) -> None:
        """How long a client took to fetch and to swap."""
        self._transfer_s.add(transfer_s)
        self._commit_s.add(commit_s)

    def time_pause(self, pause_s: float) -> None:
        """For how long a swap kept an actor from decoding."""
        self._pauses_s.append(pause_s)
        self._paused_s += pause_s

    def is_late(self, live: int, now: float) -> bool:
        """Whether a client at ``live`` has missed the deadline of the version after it.

        Measured from the oldest version that it lacks: a client that commits each version within the time is never
        late, however fast the versions come.
        """
        if self.newest is None or live >= self.newest.version:
            return False
        missing = self._announced.get(live + 1) or next(iter(self._announced.values()))
        return now - missing[0] > self._deadline_s

    def to_plain(self) -> dict[str, Any]:
        """For ``books.json``: means, but of the pauses the median and the sum."""
        return {
            "bytes": self.newest.nbytes if self.newest else None,
            "publish_s": self._publish_s.value,
            "transfer_s": self._transfer_s.value,
            "commit_s": self._commit_s.value,
            "pause_s": median(self._pauses_s) if self._pauses_s else None,
            "paused_s": self._paused_s,
            "versions": self.count,
            "mismatches": self.mismatches,
        }
