"""The versions of the weights as the server sees them: announced, proven by checksum, late, void.

trained(manifest) ─► announce ─► clients prepare, commit ─► live(version, checksum) ─► equal? ─► counts
                        │             └─ not within the deadline ─► fenced: no tickets until it has caught up
                        └─ a new life of the learner ─► withdraw: not offered any more; beyond its step: void

Versions are ordered by (epoch, version); the epoch rises whenever the run goes back to an earlier step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from async_rl.config import RunConfig
from async_rl.evaluation import is_evaluated
from async_rl.weights.manifest import Manifest
from async_rl.weights.pull import COUNTED

_KEPT = 4096
_NOTED = 64
"""Versions whose checksums a restarted server still knows: those that clients may hold then."""


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
        self._voids: deque[tuple[int, int]] = deque(maxlen=_NOTED)
        """(epoch, step): when that epoch began, all versions beyond that step became void."""
        self._void_checksums: deque[tuple[int, str]] = deque(maxlen=_NOTED)
        self.newest: Manifest | None = None
        """``None`` before the first, and from a new life of the learner until it has published."""
        self.wire: dict[str, Any] | None = None
        """The newest manifest as plain types."""
        self.evaluated_wire: dict[str, Any] | None = None
        """The newest one that is to be evaluated: what an evaluator that joins late begins with."""
        self.start: int | None = None
        """The first version of this life of the learner."""
        self.count = 0
        self.mismatches = 0
        """Times that a client claimed a version whose bytes it does not hold."""
        self.broadcasts: Counter[str] = Counter()
        """Of versions that are broadcast: how many were ``sent`` or ``failed``, places ``offered`` and ``received``."""
        self._publish_s, self._transfer_s, self._commit_s = Mean(), Mean(), Mean()
        self._received = dict.fromkeys(COUNTED, 0.0)
        self._pauses_s: deque[float] = deque(maxlen=_KEPT)
        self._paused_s = 0.0

    @property
    def epoch(self) -> int:
        """Of the newest life of the learner that is known here."""
        return self._voids[-1][0] if self._voids else 0

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

    def is_newest(self, manifest: Manifest) -> bool:
        """Whether it was announced, and nothing after it."""
        return self.newest is not None and (manifest.order, manifest.checksum) == (
            self.newest.order,
            self.newest.checksum,
        )

    def withdraw(self, step: int, epoch: int) -> None:
        """The learner begins anew at ``step``: its former segments are offered to nobody any more.

        Args:
            step: that it continues with.
            epoch: from now on; if it is a new one, versions beyond ``step`` are void.
        """
        self.newest = self.wire = self.evaluated_wire = self.start = None
        if not self._voids or epoch > self._voids[-1][0]:
            self._voids.append((epoch, step))
            for version in [v for v in self._announced if v > step]:
                self._void_checksums.append((version, self._announced.pop(version)[1]))

    def is_void(self, epoch: int, version: int) -> bool:
        """Whether that version of that epoch counts no more."""
        return any(begun > epoch and version > step for begun, step in self._voids)

    def proves(self, version: int, checksum: str) -> bool:
        """Whether these are the bytes that were published as ``version``, which is not void; a mismatch is counted."""
        announced = self._announced.get(version)
        proven = announced is not None and announced[1] == checksum
        self.mismatches += not proven and (version, checksum) not in self._void_checksums
        return proven

    def time_commit(self, transfer_s: float, commit_s: float) -> None:
        """How long a client took to fetch and to swap."""
        self._transfer_s.add(transfer_s)
        self._commit_s.add(commit_s)

    def receive(self, counts: Mapping[str, float]) -> None:
        """What a client has received over the network since it last said so."""
        for name in COUNTED:
            self._received[name] += counts.get(name, 0.0)

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
            **{name: int(count) for name, count in self._received.items()},
            **(self._broadcasts_to_plain() if self.broadcasts.total() else {}),
        }

    def _broadcasts_to_plain(self) -> dict[str, int]:
        return {f"broadcasts_{name}": self.broadcasts[name] for name in ("sent", "failed", "offered", "received")}

    # ------------------------------------------------------------------ a restart of the server

    def to_note(self) -> dict[str, Any]:
        """What a restarted server must know, as plain types."""
        return {
            "newest": _noted(self.wire),
            "evaluated": _noted(self.evaluated_wire),
            "start": self.start,
            "count": self.count,
            "mismatches": self.mismatches,
            "announced": [[version, told[1]] for version, told in list(self._announced.items())[-_NOTED:]],
            "voids": [list(void) for void in self._voids],
            "void_checksums": [list(known) for known in self._void_checksums],
        }

    @classmethod
    def from_note(cls, config: RunConfig, note: Mapping[str, Any], now: float) -> Versions:
        """As it was; the deadlines of what was announced begin anew.

        Args:
            config: of the run.
            note: what :meth:`to_note` gave.
            now: the clock.

        Raises:
            KeyError, TypeError, ValueError, WeightsError: it is none.
        """
        versions = cls(config)
        versions.wire, versions.evaluated_wire = _wire(note["newest"]), _wire(note["evaluated"])
        versions.newest = Manifest.from_wire(versions.wire) if versions.wire is not None else None
        versions.start, versions.count, versions.mismatches = note["start"], note["count"], note["mismatches"]
        versions._announced = {version: (now, checksum) for version, checksum in note["announced"]}
        versions._voids.extend((epoch, step) for epoch, step in note["voids"])
        versions._void_checksums.extend((version, checksum) for version, checksum in note["void_checksums"])
        return versions


def _noted(wire: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A manifest without bytes: notes may be written as JSON."""
    return None if wire is None else {**wire, "chunks": wire["chunks"].hex()}


def _wire(noted: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if noted is None else {**noted, "chunks": bytes.fromhex(noted["chunks"])}
