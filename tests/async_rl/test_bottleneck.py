"""The sentence that says who waited for whom."""

import pytest

from async_rl.report.bottleneck import words
from async_rl.timer import STATES


def test_a_learner_that_waits_for_data_needs_actors():
    shares = {"learner": {"training": 0.69, "waiting_data": 0.31}, "actors": {"generating": 1.0}}
    assert words(shares, 2) == "The learner waited 31% of its time for data: add actors, or make them faster."


def test_actors_that_wait_for_tickets_need_a_faster_learner_and_the_largest_wait_comes_first():
    actors = {"generating": 0.6, "scoring": 0.1, "waiting_ticket": 0.3}
    told = words({"learner": {"training": 0.97, "waiting_data": 0.03}, "actors": actors}, 2)
    assert told.startswith("The actors waited 30% of their time for tickets: the learner is behind")
    ending = (
        "The actors waited 10% of their time for rewards: raise task.verifiers, "
        "or let scorers do it (reward.placement)."
    )
    assert told.endswith(ending)


@pytest.mark.parametrize(("bound", "said"), [(0, "they took turns"), (1, "each waited for the other in turns")])
def test_when_both_wait_for_each_other_the_bound_is_to_blame(bound, said):
    shares = {
        "learner": {"training": 0.4, "waiting_data": 0.6},
        "actors": {"generating": 0.6, "waiting_ticket": 0.25, "waiting_weights": 0.15},
    }
    told = words(shares, bound)
    assert "60% of its time for data and the actors 40% for tickets and weights" in told
    assert said in told
    assert "raise buffer.max_staleness" in told


def test_small_waits_are_not_worth_a_word():
    shares = {
        "learner": {"training": 0.96, "waiting_data": 0.04},
        "actors": {"generating": 0.97, "waiting_ticket": 0.03},
    }
    assert words(shares, 2) == "Both sides were busy."


def test_nothing_is_said_of_a_run_that_never_trained():
    assert words({}, 2) == words({"learner": {}, "actors": {}}, None) == ""


def test_every_state_of_a_wait_exists():
    from async_rl.report.bottleneck import _WAITS

    assert {state for _, state in _WAITS} <= set(STATES)
