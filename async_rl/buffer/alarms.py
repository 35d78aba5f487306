"""The sentences with which a run that gets nowhere says where it is stuck. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.buffer.ledger import Ledger
from async_rl.buffer.records import Overdue
from async_rl.buffer.roster import Roster


def overdue_text(overdue: Overdue, ledger: Ledger, roster: Roster, notes: Sequence[str]) -> str:
    """What the watchdog says: who is there, what was lost, and the oldest attempts with their holders.

    Args:
        overdue: what it found.
        ledger: the books.
        roster: the clients.
        notes: what else is known to hold the run up; a row each.
    """
    rules = ledger.rules
    actors = ", ".join(
        f"{s.name} ({s.state}, version {s.live}, {len(s.held or ())} in flight)" for s in roster.of("actor")
    )
    scorers = ", ".join(f"{s.name} ({s.stage}, {s.state})" for s in roster.of("scorer")) or "none"
    text = (
        f"no group {'became ready' if rules.stages else 'was accepted'} for {rules.watchdog_s:g} s, round "
        f"{overdue.round} of {rules.watchdog_rounds}; actors: {actors or 'none'}; "
        f"{f'scorers: {scorers}; ' if rules.stages else ''}"
        f"filtered: {dict(ledger.filtered)}, failed: {dict(ledger.failed)}"
    )
    rows = [*notes, *map(str, overdue.table)] or ["nobody holds a ticket"]
    return text + "".join(f"\n  {row}" for row in rows)


def hung_learner_text(step: int, limit_s: float, roster: Roster) -> str:
    """The learner is at work on one step for longer than ``learner.step_deadline_s``."""
    ranks = ", ".join(f"rank {s.rank} {s.state}" for s in roster.of("learner")) or "none has joined"
    return f"the learner made no progress at step {step} for {limit_s:g} s (learner.step_deadline_s); ranks: {ranks}"


def missing_learner_text(step: int, limit_s: float, waiting: str) -> str:
    """No learner has come, or come back, in time.

    Args:
        step: that was to be trained.
        limit_s: the time.
        waiting: of a group over several hosts, which ranks wait and which are missing; empty: nobody is there.
    """
    why = waiting or "it has died and was not started again, or never came"
    return f"no learner was connected for {limit_s:g} s (learner.step_deadline_s) at step {step}: {why}"
