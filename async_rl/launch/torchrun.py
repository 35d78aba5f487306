"""What torchrun writes about its ranks, read from the log of the learner group.

log ─► RankFailures.read() ─► a failure each time that a rank ended and the group starts again
    └► without_report(lines): the log as its ranks wrote it, without torchrun's traceback and table
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_FAILED = re.compile(r"torch/distributed/elastic/.*failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
"""torchrun's line about the first rank that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The end of the first rank that brought its group down."""

    rank: int
    exit_code: int
    """Negative for a signal."""
    said: str | None
    """The last sentence of our own in the log before it."""

    @property
    def killed(self) -> str | None:
        """Which rank was ended by which signal; ``None`` if it ended itself."""
        return f"rank {self.rank} was ended by {signal.Signals(-self.exit_code).name}" if self.exit_code < 0 else None

    def describe(self) -> str:
        """What happened, as a sentence."""
        said = f": {self.said}" if self.said else ""
        return self.killed or f"rank {self.rank} ended with exit code {self.exit_code}{said}"


class RankFailures:
    """Reads a log as it grows.

    Args:
        log: of torchrun and its ranks.
        start: where this life of torchrun begins to write.
    """

    def __init__(self, log: Path, start: int) -> None:
        self._log, self._at = log, start
        self._said: str | None = None
        self._part = b""

    def read(self) -> list[RankFailure]:
        """Failures that were written since the last call."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            return []
        self._at += len(new)
        *lines, self._part = (self._part + new).split(b"\n")
        return [found for line in lines if (found := self._take(line.decode("utf-8", "replace"))) is not None]

    def _take(self, line: str) -> RankFailure | None:
        self._said = None if is_traceback(line) else own_sentence(line) or self._said
        match = _FAILED.search(line)
        if match is None:
            return None
        said, self._said = self._said, None
        return RankFailure(rank=int(match[2]), exit_code=int(match[1]), said=said)


def own_sentence(line: str) -> str | None:
    """What one of our processes said about why it ends, if that is the line; warnings are not meant."""
    match = re.match(r"(?:\[.*?\]:)?async-rl: (?!warning: )(.+)", line)
    return match[1] if match else None


def is_traceback(line: str) -> bool:
    """Whether a traceback begins: its process did not end by what it said before."""
    return "Traceback (most recent call last)" in line


def killed_rank(lines: Iterable[str]) -> str | None:
    """Which rank of a learner group was ended by which signal, as torchrun saw it last; ``None`` if none was."""
    found = [match for line in lines if (match := _FAILED.search(line))]
    return RankFailure(rank=int(found[-1][2]), exit_code=int(found[-1][1]), said=None).killed if found else None


def without_report(lines: Iterable[str]) -> Iterator[str]:
    """Lines that are not blank, without the traceback and table that torchrun prints at its own end.

    They follow its last line about a rank that failed; as long as it starts the group again it prints none.
    """
    kept = [line for line in lines if line.strip()]
    failed = max((i for i, line in enumerate(kept) if _FAILED.search(line)), default=len(kept))
    is_over = any("ChildFailedError" in line for line in kept[failed:])
    yield from kept[: failed + 1]
    rulers = 0
    for line in kept[failed + 1 :]:
        if is_over and rulers < 2:  # the second ruler ends the table
            rulers += bool(re.fullmatch(r"=+", line))
        else:
            yield line
