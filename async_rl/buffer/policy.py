"""The rules of admission and delivery as pure functions; the ledger applies them.

Why nothing gets too old with ``stragglers = wait``. Let N(d) be the number of never-trained attempts that must be
trained at step d or before. Admission keeps N(d) ≤ (d + 1 - next_step) · groups_per_step for every d, so a schedule
exists; delivery takes the earliest deadlines first, and only when the rest still fits into the steps that are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from async_rl.buffer.records import Entry, Rules


def capacity(rules: Rules, version: int, next_step: int) -> int:
    """Most attempts that may be outstanding for an actor at ``version`` to get another ticket.

    ``(version + η + 1 − next_step) · groups_per_step``: as many groups as the steps that its tokens may still reach
    can train, the steps of the run at most. Zero or less when the actor is too far behind.
    """
    reachable = min(version + rules.max_staleness + 1, rules.steps) - next_step
    return reachable * rules.groups_per_step


def choose(rules: Rules, step: int, ready: Collection[Entry], waiting: Collection[Entry]) -> list[Entry] | None:
    """The batch of ``step`` out of what is ``ready``, or ``None`` if it has to wait.

    Args:
        rules: of the run.
        step: the step to deliver.
        ready: groups that can be trained.
        waiting: attempts that are open or scored.
    """
    if step >= rules.steps or len(ready) < rules.groups_per_step:
        return None
    order = by_urgency(ready)
    chosen, rest = order[: rules.groups_per_step], order[rules.groups_per_step :]
    if rules.stragglers == "wait" and not leaves_time(rules, step, waiting, rest):
        return None
    return chosen


def by_urgency(ready: Iterable[Entry]) -> list[Entry]:
    """Never-trained groups first, by deadline and ordinal; replays fill the rest."""
    return sorted(ready, key=lambda e: (e.uses > 0, e.deadline, e.ordinal))


def leaves_time(rules: Rules, step: int, waiting: Iterable[Entry], rest: Iterable[Entry]) -> bool:
    """Whether, with ``step`` delivered, all that was never trained still fits into its own later steps.

    For each deadline d of a waiting attempt: the number due by d is at most (d − step) · groups_per_step. Only waiting
    attempts are looked at, because only for them it helps to wait.

    Args:
        rules: of the run.
        step: the step to deliver.
        waiting: attempts that are open or scored.
        rest: ready groups that ``step`` does not take.
    """
    waited_for = [e.deadline for e in waiting]
    due = Counter(waited_for) + Counter(e.deadline for e in rest if not e.uses)
    return all(
        sum(n for d, n in due.items() if d <= deadline) <= (deadline - step) * rules.groups_per_step
        for deadline in set(waited_for)
    )
