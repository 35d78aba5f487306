"""The plan as a table and in words."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from async_rl.buffer.batch_stats import describe_ages
from async_rl.plan.candidates import BUSY, Plan, Row
from async_rl.plan.scenario import Scenario


def show(plan: Plan, unit: str) -> None:
    """Print both.

    Args:
        plan: what was found.
        unit: what is counted: ``tokens``, or ``env steps``.
    """
    table = Table("actors : ranks", "η", "learner", "actors", f"{unit}/s", "of ideal", "age mean", "age by share")
    for row in plan.rows:
        outcome, ages = row.outcome, describe_ages(row.outcome.ages)
        table.add_row(
            f"{row.scenario.actors} : {row.scenario.ranks}",
            str(row.bound),
            _percent(outcome.learner),
            _percent(outcome.actors),
            f"{row.tokens_per_s:,.0f}",
            _percent(row.of_ideal),
            f"{ages['mean']:.2f}",
            _ages(row),
            style="bold" if row is plan.choice else "",
        )
    console = Console()
    console.print(table)
    for sentence in sentences(plan, unit):
        console.print(sentence, highlight=False)


def assumptions(scenario: Scenario, unit: str) -> str:
    """What was counted with, in a line."""
    speeds = scenario.speeds
    parts = [
        f"a step of {speeds.step_s:g} s for {scenario.tokens_per_step:,.0f} {unit}",
        f"{speeds.slot_tokens_per_s:,.4g} {unit}/s of each of {scenario.slots} slots",
        f"mean length {scenario.lengths.mean():,.0f}",
        f"publishing {speeds.publish_s:g} s, {speeds.weights_s:g} s until it is live, pause {speeds.pause_s:g} s",
    ]
    if speeds.filtered:
        parts.append(f"{100 * speeds.filtered:.0f} % of the groups filtered")
    return "; ".join(parts) + f"; both sides are equally fast at {scenario.balanced_actors:,.2f} actors"


def sentences(plan: Plan, unit: str) -> list[str]:
    """The recommendation."""
    choice = plan.choice
    scenario, outcome = choice.scenario, choice.outcome
    ages = describe_ages(outcome.ages)
    found = [
        f"Take {_count(scenario.actors, 'actor')} for {_count(scenario.ranks, 'learner rank')} and max_staleness = "
        f"{choice.bound}: the learner works {_percent(outcome.learner)} of the time, the actors' slots "
        f"{_percent(outcome.actors)}; {choice.tokens_per_s:,.0f} {unit}/s, a step every {outcome.step_s:.3g} s; mean "
        f"age {ages['mean']:.2f}, at most {ages['max']}.",
        _bottleneck(choice),
        _about_bound(plan),
        "A version is published after every step: there is no other sync interval.",
    ]
    if outcome.lost > 0.01:
        found.append(f"{_percent(outcome.lost)} of the attempts end without being trained: filtered, or issued again.")
    factors = sorted({row.thinned for row in plan.rows if row.thinned > choice.thinned})
    if choice.thinned > 1:
        found.append(f"This is from a system {choice.thinned} times smaller, which waits less for its longest answers.")
    elif factors:
        found.append(
            f"The other rows are from systems {factors[0]} or more times smaller, which wait less for their longest "
            "answers."
        )
    return [sentence for sentence in found if sentence]


def _bottleneck(row: Row) -> str:
    outcome = row.outcome
    if outcome.learner >= BUSY and outcome.actors >= BUSY:
        return "Both sides are busy."
    if outcome.learner >= BUSY:
        return "The learner is the limit: more actors would only wait; more ranks would train more."
    if outcome.actors >= BUSY:
        return f"The actors are the limit: the learner waits {_percent(1 - outcome.learner)} of the time; add actors."
    return (
        f"Both sides wait for each other (learner {_percent(1 - outcome.learner)}, actors "
        f"{_percent(1 - outcome.actors)}): the longest answers of a batch, or the way of the weights, hold the step "
        "up; shorter answers, a larger η or larger batches help."
    )


def _about_bound(plan: Plan) -> str:
    """What other η give with as many actors."""
    choice = plan.choice
    others = [row for row in plan.rows if row.scenario.actors == choice.scenario.actors and row is not choice]
    smaller = [row for row in others if row.bound < choice.bound]
    larger = [row for row in others if row.bound > choice.bound]
    parts = []
    if smaller:
        below = max(smaller, key=lambda row: row.bound)
        parts.append(f"η = {below.bound} trains {_percent(below.tokens_per_s / choice.tokens_per_s)} of that")
    if larger:
        best = max(larger, key=lambda row: row.tokens_per_s)
        gain = best.tokens_per_s / choice.tokens_per_s - 1
        parts.append(f"a larger one {f'{_percent(gain)} more' if gain >= 0.01 else 'no more'}")
    return f"With so many actors {', '.join(parts)}." if parts else ""


def _ages(row: Row) -> str:
    total = sum(row.outcome.ages.values())
    shares = ((age, count / total) for age, count in sorted(row.outcome.ages.items()))
    return "  ".join(f"{age}: {_percent(share)}" for age, share in shares if share >= 0.005)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
