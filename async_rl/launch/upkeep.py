"""Keeps the processes alive that a host adds to a run elsewhere: engines, scorers, or ranks of the learner group.

crew of this host ─► died by accident? ─► another life          all have left ─► exit code 0, all given up ─► an error

Nobody here sees whether a life has worked (the launcher on the first host does): one that lasts is taken to have.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field

from async_rl.errors import AsyncRLError
from async_rl.launch.children import Child, end_all, end_descendants, wait_all
from async_rl.launch.crew import Crew, Member, see
from async_rl.launch.ending import describe
from async_rl.launch.interrupts import Interrupts

WORKED_S = 60.0
"""A life of this length has worked."""
_TURN_S = 0.2


@dataclass(slots=True)
class Upkeep:
    """Looks after a crew.

    Args:
        crew: the processes of this host, all started.
        interrupts: end them.
        spare: process ids below this one that live on.
        grace_s: from the first request to end until they are killed; a second request kills them at once.
    """

    crew: Crew
    interrupts: Interrupts
    spare: Collection[int] = ()
    grace_s: float = 4.0
    _since: dict[str, tuple[int, float]] = field(init=False, default_factory=dict)
    """Number and beginning of each member's present life."""

    def run(self) -> int:
        """Until all have left or the user ends it; the exit code. Nothing that they started is left.

        Raises:
            AsyncRLError: all are given up; with the end of a log.
        """
        members = list(self.crew.members.values())
        try:
            while not self.interrupts.count and not all(map(_is_over, members)):
                for member in members:
                    self._praise(member, time.monotonic())
                    self.crew.tend(member, _has_died)
                    self._look(member, time.monotonic())
                self._wait(members)
        finally:
            for child in self.crew.children:
                child.signal(signal.SIGTERM)
            wait_all(self.crew.children, self.grace_s, lambda: self.interrupts.count < 2)
            end_all(self.crew.children, 0.0)
            end_descendants(self.spare)
        if self.interrupts.count:
            return self.interrupts.exit_code
        if all(member.lives.given_up for member in members):
            last = self.crew.last_life(members[-1].name)
            # torchrun's last words are about its own end; what its rank said has been told when it was given up
            under_torchrun = members[-1].ranks is not None
            raise AsyncRLError(f"{last.name} is given up; {see(last)}" if under_torchrun else describe(last))
        return 0

    def _praise(self, member: Member, now: float) -> None:
        number, began = self._since.get(member.name, (-1, now))
        if number == member.lives.restarts and now - began > WORKED_S:
            member.lives.work()

    def _look(self, member: Member, now: float) -> None:
        """Note when a life has begun, which torchrun does without us."""
        if self._since.get(member.name, (-1, now))[0] != member.lives.restarts:
            self._since[member.name] = (member.lives.restarts, now)

    def _wait(self, members: list[Member]) -> None:
        """Until one ends, the user interrupts, or it is time to look what torchrun says."""
        with ExitStack() as stack:
            handles = []
            for member in members:
                if member.child is not None and member.is_alive:
                    handle = os.pidfd_open(member.child.pid)
                    stack.callback(os.close, handle)
                    handles.append(handle)
            if not all(map(_is_over, members)):
                self.interrupts.wait(_TURN_S, handles)


def _has_died(child: Child) -> bool:
    """Exit code 0 means that it left because the run is over."""
    return bool(child.poll())


def _is_over(member: Member) -> bool:
    return member.lives.given_up or (member.child is not None and member.child.poll() == 0)
