"""The rules of admission and delivery as pure functions; the ledger applies them.

Why nothing gets too old with ``stragglers = wait``. Let N(d) be the number of never-trained attempts that must be
trained at step d or before. Admission keeps N(d) ≤ (d + 1 - next_step) · groups_per_step for every d, so a schedule
exists; delivery takes the earliest deadlines first, and only when the rest still fits into the steps that are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from async_rl.buffer.records import Entry, Rules
from async_rl.buffer.shelf import Shelf


def capacity(rules: Rules, version: int, next_step: int) -> int:
    """Most attempts that may be outstanding for an actor at ``version`` to get another ticket.

    ``(version + η + 1 − next_step) · groups_per_step``: as many groups as the steps that its tokens may still reach
    can train, the steps of the run at most. Zero or less when the actor is too far behind.
    """
    reachable = min(version + rules.max_staleness + 1, rules.steps) - next_step
    return reachable * rules.groups_per_step


def choose(rules: Rules, step: int, ready: Shelf, waiting: Mapping[int, int]) -> list[Entry] | None:
    """The batch of ``step`` out of what is ``ready``, or ``None`` if it has to wait (found out without sorting).

    Args:
        rules: of the run.
        step: the step to deliver.
        ready: groups that can be trained.
        waiting: attempts that are open or scored, by deadline.
    """
    if step >= rules.steps or len(ready) < rules.groups_per_step:
        return None
    if rules.stragglers == "wait" and not leaves_time(rules, step, waiting, ready.due):
        return None
    return by_urgency(ready.values())[: rules.groups_per_step]


def by_urgency(ready: Iterable[Entry]) -> list[Entry]:
    """Never-trained groups first, by deadline and ordinal; replays fill the rest."""
    return sorted(ready, key=lambda e: (e.uses > 0, e.deadline, e.ordinal))


def leaves_time(rules: Rules, step: int, waiting: Mapping[int, int], ready: Mapping[int, int]) -> bool:
    """Whether, with ``step`` delivered, all that was never trained still fits into its own later steps.

    For each deadline d of a waiting attempt: the number due by d is at most (d − step) · groups_per_step. Only waiting
    attempts are looked at, because only for them it helps to wait. ``step`` takes the earliest of the ready groups.

    Args:
        rules: of the run.
        step: the step to deliver.
        waiting: attempts that are open or scored, by deadline.
        ready: never-trained groups that are ready, by deadline.
    """
    taken, due = rules.groups_per_step, 0
    for deadline in sorted(waiting.keys() | ready.keys()):
        left = max(0, ready.get(deadline, 0) - taken)
        taken -= ready.get(deadline, 0) - left
        due += waiting.get(deadline, 0) + left
        if waiting.get(deadline, 0) and due > (deadline - step) * rules.groups_per_step:
            return False
    return True
