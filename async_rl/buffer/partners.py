"""Ranks on several hosts: when one has vanished the others are told, who are inside a collective and wait for it.

    rank 1: silent ─► away for so long that nobody waits for it ─► rank 0, 2, ... on other hosts: begin again

A dead process resets its connections and ends the collective, as a rule; a host that loses power or network does not,
and ``learner.timeout_s`` is long. Who is only late is waited for, as long as a frozen process of the first host.
"""

from __future__ import annotations

from async_rl.buffer.roster import Roster, Session
from async_rl.launch.silence import longest_silence_s


class Partners:
    """The ranks of the present life of the learner group.

    Args:
        roster: the clients.
        period_s: ``buffer.heartbeat_s``: who is silent for so long has been let go, but may come back.
    """

    def __init__(self, roster: Roster, period_s: float) -> None:
        self._roster = roster
        self._longest_turn_s = period_s / 2
        self._silence_s = longest_silence_s(period_s)
        self._patience_s = self._silence_s - period_s
        self._group: str | None = None
        self._known: dict[int, Session] = {}
        """By rank: who has said hello in this life."""
        self._away_s: dict[int, float] = {}
        self._looked = 0.0

    def forsaken(self, group: str | None, now: float) -> list[tuple[Session, str]]:
        """Who is to begin again, each with the reason; every turn, so that this server's own sleep is not counted.

        Args:
            group: life of the learner group that trains now.
            now: the clock.
        """
        turn_s, self._looked = min(now - self._looked, self._longest_turn_s), now
        if group != self._group:
            self._group = group
            self._forget()
        here = {s.rank: s for s in self._roster.of("learner") if s.group == group}
        self._known |= here
        away = {rank: s for rank, s in self._known.items() if rank not in here and s.gone != "bye"}
        self._away_s = {rank: self._away_s.get(rank, -turn_s) + turn_s for rank in away}
        lost = [s for rank, s in away.items() if s.gone == "dead" or self._away_s[rank] > self._patience_s]
        if not lost:
            return []
        self._forget()
        why = f"{'; '.join(map(self._fate, lost))}: begin again"
        elsewhere = {s.host for s in lost}  # on its own host torchrun, or the launcher, sees to the others
        return [(s, why) for s in here.values() if s.host not in elsewhere]

    def _fate(self, lost: Session) -> str:
        fate = "has died" if lost.gone == "dead" else f"has not been heard of for {self._silence_s:g} s"
        return f"rank {lost.rank} on {lost.host.partition('/')[0]} {fate}"

    def _forget(self) -> None:
        self._known.clear()
        self._away_s.clear()
