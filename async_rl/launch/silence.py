"""Processes that live but do not move: who has been silent for so long that it is better started again. Pure.

names that the server calls silent ─► look(now) ─► those that were silent for longer than ``limit_s``
"""

from __future__ import annotations

from collections.abc import Collection

from async_rl.protocol import SERVER_GONE_S

SILENT_PERIODS = 6.0
"""So many heartbeat periods without a word, and a process of this host is ended and started again. One that wakes up
earlier just goes on: only its leases have moved."""
LEAST_S = 10.0
"""But not sooner: with a short period a host that is busy is soon silent for some of them."""


def longest_silence_s(heartbeat_s: float) -> float:
    """Seconds without a word after which a process is ended, for a period of so many seconds."""
    return max(LEAST_S, SILENT_PERIODS * heartbeat_s)


def longest_server_silence_s(heartbeat_s: float) -> float:
    """The same of the server: its clients' patience must outlast a frozen one, or they are gone when it is back."""
    return min(longest_silence_s(heartbeat_s), max(SERVER_GONE_S, heartbeat_s) / 2)


class Silence:
    """Since when whom nobody has heard. Ask it often: a gap between two looks is the asker's own sleep.

    Args:
        limit_s: longest silence.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: dict[str, float] = {}
        self._forgiven: set[str] = set()
        self._looked: float | None = None

    def forgive(self, name: str) -> None:
        """It begins another life: what is said of it until it is heard again concerns the life before."""
        self._forgiven.add(name)

    def look(self, silent: Collection[str], now: float) -> list[str]:
        """Names that have been silent for too long, each of them once in one silence.

        Args:
            silent: whom the server does not hear now.
            now: the clock.
        """
        if self._looked is not None and now - self._looked > self._limit_s / 2:
            self._since.clear()  # we were away ourselves, and so knew nothing
        self._looked = now
        self._forgiven &= set(silent)
        self._since = {name: self._since.get(name, now) for name in silent if name not in self._forgiven}
        late = [name for name, since in self._since.items() if now - since > self._limit_s]
        self._forgiven |= set(late)
        return late
