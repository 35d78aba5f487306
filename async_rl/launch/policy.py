"""Whether a process that died begins another life, and when. Pure: the clock is passed in.

begin ─► (worked) ─► end ─► next_at ─► begin ...          MAX_RESTARTS lives in a row without work: given up
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.errors import StartAgainError

MAX_RESTARTS = 3
"""So many restarts in a row of which none led to work; then a process is given up."""
BACKOFF_S = 1.0
"""Before the first restart; twice as long before each further one in a row."""
MAX_BACKOFF_S = 60.0


def backoff_s(barren: int) -> float:
    """Seconds before a restart.

    Args:
        barren: restarts in a row before this one that led to no work.
    """
    return float(min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** min(barren, 30)))


def is_hopeless(exit_code: int, sentence: str | None) -> bool:
    """Whether another life would end the same way: the process said itself why it cannot go on.

    Args:
        exit_code: negative for a signal, 128 and the signal's number if it was caught. One that was killed, or was told
            to end or to come back, said nothing about itself.
        sentence: of its own, if it left one (:func:`async_rl.launch.children.sentence`).
    """
    return 0 < exit_code < 128 and exit_code != StartAgainError.exit_code and sentence is not None


def is_forsaken(exit_code: int) -> bool:
    """Whether a process ended because its partners were gone, or asked it to."""
    return exit_code == StartAgainError.exit_code


@dataclass(slots=True)
class Lives:
    """The lives of one process, one after the other."""

    restarts: int = 0
    """In all; for the account."""
    barren: int = 0
    """Restarts in a row since a life has worked."""
    next_at: float | None = None
    """When the next life begins; ``None`` while it lives or is given up."""
    given_up: bool = False
    has_worked: bool = False
    """Some life has."""
    is_guest: bool = False
    """The other ranks of its group are on other hosts: whether it gets anywhere is seen on the first one, where the run
    ends if it does not."""

    def work(self) -> None:
        """The present life has worked: what was before it is forgiven."""
        self.barren, self.has_worked = 0, True

    def end(self, now: float, *, hopeless: bool = False, forsaken: bool = False) -> bool:
        """The present life has ended; whether there will be another one.

        Args:
            now: the clock.
            hopeless: see :func:`is_hopeless`. A restart that says so before it has worked is believed only if no life
                before has: what it lacks was there before, and may be again, such as the memory of the one that died.
            forsaken: it ended because its partners had, which does not count against a guest.
        """
        if forsaken and self.is_guest:
            self.barren = 0
        is_restart = self.has_worked and self.barren > 0
        self.given_up = (hopeless and not is_restart) or self.barren >= MAX_RESTARTS
        self.next_at = None if self.given_up else now + backoff_s(self.barren)
        return not self.given_up

    def is_due(self, now: float) -> bool:
        """Whether the next life is to begin."""
        return self.next_at is not None and now >= self.next_at

    def begin(self) -> None:
        """The next life begins."""
        self.restarts += 1
        self.barren += 1
        self.next_at = None
