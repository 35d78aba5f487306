from __future__ import annotations

import math

import numpy as np
import pytest
from buffer_helpers import NUM_TASKS, annotation, answer, ledger, make, rules

from async_rl.buffer.journal import freeze, load, save, thaw
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.records import Rules
from async_rl.config import parse_config
from async_rl.data import Annotation, Group
from async_rl.errors import ConfigError

BOTH = ("reward", "reference")


def submitted(count: int = 1, **changes) -> Ledger:
    """A ledger with ``count`` groups in scoring, of ordinals 0, 1, ..."""
    books = ledger(**{"stages": BOTH, **changes})
    rewards = (math.nan, math.nan) if "reward" in books.rules.stages else (0.0, 1.0)
    for _ in range(count):
        submit_next(books, rewards=rewards)
    return books


def submit_next(books: Ledger, version: int = 0, now: float = 0.0, **changes) -> None:
    ticket = books.issue("a", version, now)
    assert ticket is not None
    assert books.submit("a", answer(ticket, **changes), now).outcome == "accepted"


def lease(books: Ledger, stage: str, scorer: str = "s", now: float = 0.0) -> Group:
    group = books.scoring.lease(stage, scorer, now)
    assert group is not None
    return group


def say(books: Ledger, item: Annotation, scorer: str = "s", now: float = 0.0) -> tuple[str, str, bool]:
    answered = books.annotate(scorer, item, now)
    return answered.outcome, answered.reason, answered.fresh


def test_stages_work_in_parallel_and_the_group_is_ready_with_what_both_added():
    books = submitted()
    held = books.held_bytes
    for_reward, for_reference = lease(books, "reward", "r"), lease(books, "reference", "f")
    assert for_reward is for_reference
    assert say(books, annotation(for_reference, "reference"), "f") == ("accepted", "", True)
    assert (books.books()["scoring"], books.books()["ready"]) == (1, 0)
    assert say(books, annotation(for_reward, "reward"), "r") == ("accepted", "", True)
    assert (books.books()["scoring"], books.books()["ready"]) == (0, 1)
    group = books.ready[0].payload
    np.testing.assert_array_equal(group.rewards, [0.0, 1.0])
    # two prompt tokens (0 there, whatever was sent), one sampled, twice
    np.testing.assert_array_equal(group.arrays["ref_logprobs"], np.float32([0, 0, -0.25, 0, 0, -0.25]))
    assert books.held_bytes == held + 6 * 4
    assert np.isnan(for_reward.rewards).all(), "the submitted group itself never changes"


def test_a_group_is_with_one_scorer_of_a_stage_at_a_time_and_the_most_urgent_goes_first():
    books = ledger(stages=("reward",), max_staleness=2)
    for version in (0, 0, 1):
        if version == 1:
            books.version = 1
        ticket = books.issue("a", version, 0.0)
        assert ticket is not None
        if ticket.ordinal == 0:  # younger tokens than its ticket: less urgent than ordinal 1
            books.version = 1
            books.submit("a", answer(ticket, versions=(1,)), 0.0)
        else:
            books.submit("a", answer(ticket), 0.0)
    assert [lease(books, "reward", scorer).ordinal for scorer in "xyx"] == [1, 0, 2]
    assert books.scoring.lease("reward", "z", 0.0) is None


def test_what_actors_say_about_rewards_and_references_is_dropped_when_stages_give_them():
    books = ledger(stages=BOTH)
    ticket = books.issue("a", 0, 0.0)
    assert ticket is not None
    group = answer(ticket, rewards=(1.0, 1.0))
    object.__setattr__(group, "arrays", {**group.arrays, "ref_logprobs": np.zeros(6, np.float32)})
    books.submit("a", group, 0.0)
    waiting = lease(books, "reward")
    assert np.isnan(waiting.rewards).all()
    assert "ref_logprobs" not in waiting.arrays


def test_a_reference_alone_leaves_the_rewards_and_judges_them_before_any_scorer_works():
    books = ledger(stages=("reference",), replace_zero_variance=True)
    first, second = books.issue("a", 0, 0.0), books.issue("a", 0, 0.0)
    assert first is not None
    assert second is not None
    assert books.submit("a", answer(first, rewards=(1.0, 1.0)), 0.0).reason == "zero_variance"
    assert books.submit("a", answer(second, rewards=(0.0, 1.0)), 0.0).outcome == "accepted"
    assert lease(books, "reference").ordinal == 1
    assert books.scoring.lease("reference", "s", 0.0) is None


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((1.0, 1.0), "zero_variance"), ((math.nan, 1.0), "bad_reward"), ((math.inf, 1.0), "bad_reward")],
)
def test_useless_rewards_filter_the_group_at_once_and_release_its_capacity(rewards, reason):
    books = submitted(4, replace_zero_variance=True)  # all the room there is
    assert books.issue("a", 0, 0.0) is None
    reference, reward = lease(books, "reference", "f"), lease(books, "reward")
    item = Annotation(ordinal=0, attempt=0, stage="reward", values=np.float32(rewards))
    assert say(books, item) == ("filtered", reason, True)
    assert say(books, item) == ("filtered", reason, False)
    assert books.filtered == {reason: 1}
    assert say(books, annotation(reference, "reference"), "f") == ("late", "moved_on", False)
    assert reward.ordinal == 0
    assert books.held_bytes == 3 * make(0).nbytes
    fresh = books.issue("a", 0, 0.0)
    assert fresh is not None
    assert (fresh.ordinal, fresh.attempt) == (4, 0)


@pytest.mark.parametrize(
    ("stage", "values", "reason"),
    [
        ("reward", [1.0], "wrong_group_size"),
        ("reference", [-1.0] * 5, "wrong_length"),
        ("reference", [0, 0, math.nan, 0, 0, -1], "bad_ref_logprobs"),
        ("reference", [0, 0, 0.5, 0, 0, -1], "bad_ref_logprobs"),
        ("reference", [0, 0, -1e30, 0, 0, -1], "bad_ref_logprobs"),
    ],
)
def test_an_annotation_that_does_not_fit_is_refused_and_another_scorer_tries(stage, values, reason):
    books = submitted()
    lease(books, stage, "bad")
    item = Annotation(ordinal=0, attempt=0, stage=stage, values=np.float32(values))
    assert say(books, item, "bad") == ("refused", reason, True)
    assert say(books, item, "bad") == ("refused", reason, False)
    again = lease(books, stage, "good")
    assert say(books, annotation(again, stage), "good") == ("accepted", "", True)
    assert books.failed == {}
    assert books.scoring.to_plain()[stage]["failed"] == 1


def test_a_prompt_may_hold_anything_in_the_reference_s_answer():
    books = submitted(stages=("reference",))
    lease(books, "reference")
    values = np.float32([math.nan, 9, -1, -math.inf, 0, -2])
    assert say(books, Annotation(ordinal=0, attempt=0, stage="reference", values=values))[0] == "accepted"
    np.testing.assert_array_equal(books.ready[0].payload.arrays["ref_logprobs"], np.float32([0, 0, -1, 0, 0, -2]))


def test_only_who_has_or_had_the_group_may_annotate_it():
    books = submitted()
    group = lease(books, "reward", "s")
    assert say(books, annotation(group, "reward"), "thief") == ("refused", "never_leased", False)
    assert say(books, annotation(make(7), "reward"), "s") == ("late", "moved_on", False)
    assert say(books, annotation(make(0, 3), "reward"), "s") == ("late", "moved_on", False)
    assert say(books, annotation(group, "reward"), "s")[0] == "accepted"


def test_an_expired_lease_goes_to_another_and_the_first_answer_counts():
    books = submitted(lease_s=10.0)
    lease(books, "reward", "slow", now=0.0)
    assert books.expire(10.0) == []
    assert books.scoring.lease("reward", "fast", 10.0) is None
    books.expire(10.5)
    group = lease(books, "reward", "fast", now=11.0)
    assert say(books, annotation(group, "reward"), "slow", 12.0) == ("accepted", "", True)
    assert say(books, annotation(group, "reward"), "fast", 13.0) == ("late", "moved_on", False)
    assert say(books, annotation(group, "reward"), "slow", 14.0) == ("accepted", "", False)
    assert (books.failed, books.retry) == ({}, [])
    assert not books.scoring.queues["reward"].leases.total()


def test_a_lost_scorer_s_groups_go_to_the_others_and_nothing_is_generated_again():
    books = submitted(3)
    first = [lease(books, "reward", "dying") for _ in range(2)]
    assert books.lose_scorer("dying", died=False) == (2, [])
    assert [lease(books, "reward", "other").ordinal for _ in range(3)] == [0, 1, 2]
    assert books.books()["failed"] == 0
    # It was only slow, and comes back with what it had made.
    assert say(books, annotation(first[0], "reward"), "dying") == ("accepted", "", True)


def test_a_group_that_kills_every_scorer_is_filtered_and_those_that_lay_beside_it_are_scored():
    books = submitted(3, stages=("reward",))
    for _ in range(3):
        lease(books, "reward", "first")
    assert books.lose_scorer("first", died=True) == (3, [])
    for scorer, filtered in (("second", []), ("third", [(0, 0)])):  # ordinal 0 is the most urgent, and the deadly one
        assert lease(books, "reward", scorer).ordinal == 0
        assert books.scoring.lease("reward", scorer, 0.0) is None, "a suspect is alone"
        assert books.lose_scorer(scorer, died=True) == (1, filtered)
    assert books.filtered == {"scorers_died": 1}
    for ordinal in (1, 2):
        group = lease(books, "reward", "fourth")
        assert group.ordinal == ordinal
        assert books.scoring.lease("reward", "fourth", 0.0) is None
        assert say(books, annotation(group, "reward"), "fourth") == ("accepted", "", True)
    assert (books.books()["ready"], books.books()["scoring"], books.failed) == (2, 0, {})
    assert books.held_bytes == 2 * make(0).nbytes


def test_a_scorer_ends_what_it_has_before_it_gets_a_suspect():
    books = submitted(2, stages=("reward",))
    lease(books, "reward", "dead")
    books.lose_scorer("dead", died=True)
    submit_next(books, rewards=(math.nan, math.nan))
    assert lease(books, "reward", "one").ordinal == 0
    other = lease(books, "reward", "two")
    assert (other.ordinal, lease(books, "reward", "two").ordinal) == (1, 2)
    books.lose_scorer("one", died=True)
    assert books.scoring.lease("reward", "two", 0.0) is None
    for ordinal in (1, 2):
        say(books, annotation(make(ordinal), "reward"), "two")
    assert lease(books, "reward", "two").ordinal == 0


def test_a_final_failure_filters_the_task_and_three_others_do_too():
    books = submitted(2)
    for scorer in "sss":
        assert lease(books, "reward", scorer).ordinal == 0
        answered = books.fail_stage(scorer, "reward", 0, 0, "judge_down", 0.0, final=False)
        repeated = books.fail_stage(scorer, "reward", 0, 0, "judge_down", 0.0, final=False)
        assert (repeated.outcome, repeated.reason, repeated.fresh) == (answered.outcome, answered.reason, False)
    assert (answered.outcome, answered.reason, answered.fresh) == ("filtered", "judge_down", True)
    lease(books, "reward", "s")
    assert books.fail_stage("s", "reward", 1, 0, "no_answer", 0.0, final=True).outcome == "filtered"
    assert books.filtered == {"judge_down": 1, "no_answer": 1}
    assert books.books()["scoring"] == 0
    assert books.held_bytes == 0


def test_who_has_not_got_the_group_any_more_cannot_fail_it():
    books = submitted(lease_s=10.0)
    lease(books, "reward", "slow")
    books.expire(11.0)
    lease(books, "reward", "fast", 11.0)
    assert books.fail_stage("slow", "reward", 0, 0, "broken", 12.0, final=True).outcome == "late"
    assert books.scoring.queues["reward"].leases["fast"] == 1


def test_a_step_waits_for_a_group_in_scoring_whose_deadline_it_is_and_reissue_cuts_it():
    for stragglers in ("wait", "reissue"):
        books = submitted(2, stages=("reward",), max_staleness=1, groups_per_step=1, stragglers=stragglers)
        slow, quick = lease(books, "reward", "slow"), lease(books, "reward")
        say(books, annotation(quick, "reward"))
        assert books.deliver() is not None  # step 0 takes ordinal 1; 0 must be trained at step 1
        books.train(0)
        submit_next(books, version=1)
        say(books, annotation(lease(books, "reward"), "reward"))
        delivery = books.deliver()
        if stragglers == "wait":
            assert delivery is None
            assert say(books, annotation(slow, "reward"), "slow")[0] == "accepted"
            delivery = books.deliver()
            assert delivery is not None
            assert [g.ordinal for g in delivery.groups] == [0]
        else:
            assert delivery is not None
            assert [g.ordinal for g in delivery.groups] == [2]
            assert books.failed == {"straggler": 1}
            assert say(books, annotation(slow, "reward"), "slow")[0] == "late"
            assert not books.scoring.queues["reward"].leases.total()


def test_the_watchdog_is_fed_by_ready_groups_names_scorer_or_none_and_never_throws_a_group_away():
    books = submitted(0, watchdog_s=10, watchdog_rounds=2, lease_s=1000, max_staleness=5)
    books.watch(0.0, step_waits=True)
    submit_next(books, now=1.0)
    submit_next(books, now=9.0)  # accepted, but not ready
    lease(books, "reward", "hung", now=9.0)
    overdue = books.watch(10.5, step_waits=True)
    assert overdue is not None
    assert [(r.ordinal, r.state) for r in overdue.table] == [
        (0, "scoring (reward: hung, reference: no scorer)"),
        (1, "scoring (reward: no scorer, reference: no scorer)"),
    ]
    assert overdue.lost == ()
    final = books.watch(21.0, step_waits=True)
    assert final is not None
    assert final.exhausted
    assert books.books()["scoring"] == 2
    assert [lease(books, "reward", "other", 21.0).ordinal for _ in range(2)] == [0, 1], "the hung lease has gone back"


def test_the_watchdog_is_calm_while_groups_become_ready():
    books = submitted(2, watchdog_s=10, stages=("reward",))
    books.watch(0.0, step_waits=True)
    say(books, annotation(lease(books, "reward"), "reward"), now=9.0)
    assert books.watch(15.0, step_waits=True) is None
    assert books.watch(19.5, step_waits=True) is not None


def test_a_stage_counts_groups_and_the_seconds_in_which_somebody_worked():
    books = submitted(3, stages=("reward",))
    first, second = lease(books, "reward", "x", 10.0), lease(books, "reward", "y", 11.0)
    say(books, annotation(first, "reward"), "x", 14.0)
    say(books, annotation(second, "reward"), "y", 15.0)  # 10 to 15
    third = lease(books, "reward", "x", 100.0)
    say(books, annotation(third, "reward"), "x", 102.0)  # 100 to 102
    assert books.scoring.to_plain() == {
        "reward": {"annotated": 3, "seconds": 7.0, "failed": 0, "returned": 0, "waiting": 0, "leased": 0}
    }


def test_a_checkpoint_keeps_what_is_in_scoring_with_what_it_still_awaits(tmp_path):
    books = submitted(3, max_staleness=2)
    for stage, ordinal in (("reward", 0), ("reference", 0), ("reward", 1)):
        group = lease(books, stage)
        assert group.ordinal == ordinal
        say(books, annotation(group, stage))
    lease(books, "reward")  # 2 is with a scorer
    save(freeze(books), tmp_path)
    back = thaw(load(tmp_path), rules(max_staleness=2, stages=BOTH), lambda o: o % NUM_TASKS)
    assert back.books() == books.books()
    assert (back.books()["ready"], back.books()["scoring"], back.failed) == (1, 2, {})
    assert back.held_bytes == books.held_bytes
    assert [lease(back, "reference").ordinal for _ in range(2)] == [1, 2]
    assert lease(back, "reward").ordinal == 2
    say(back, annotation(make(1), "reference"))
    np.testing.assert_array_equal(back.ready[1].payload.rewards, [0.0, 1.0])


def test_a_run_that_is_resumed_without_the_reward_stage_issues_again_what_has_no_rewards(tmp_path):
    books = submitted(2)
    say(books, annotation(lease(books, "reward"), "reward"))
    save(freeze(books), tmp_path)
    back = thaw(load(tmp_path), rules(), lambda o: o % NUM_TASKS)
    assert back.books()["ready"] == 1
    assert back.failed == {"resumed": 1}
    assert back.retry == [(1, 1, 1, 0)]


def test_a_run_that_is_resumed_with_another_place_for_the_reference_has_batches_of_one_kind():
    books = submitted(1, stages=("reference",))
    say(books, annotation(lease(books, "reference"), "reference"))
    back = thaw(freeze(books), rules(), lambda o: o % NUM_TASKS)
    assert "ref_logprobs" not in back.ready[0].payload.arrays
    again = thaw(freeze(back), rules(stages=("reference",)), lambda o: o % NUM_TASKS)
    assert lease(again, "reference").ordinal == 0


def test_the_end_of_the_run_closes_the_books_over_groups_in_scoring():
    books = submitted(2)
    group = lease(books, "reward")
    assert books.close("run_ended") == []
    assert books.failed == {"run_ended": 2}
    assert books.held_bytes == 0
    assert say(books, annotation(group, "reward"))[0] == "late"


def test_the_rules_of_a_run_know_its_stages_and_the_longest_episode():
    config = parse_config(
        {
            "reward": {"placement": "scorer"},
            "algorithm": {"kl_coef": 0.1},
            "reference": {"placement": "scorer"},
            "sampling": {"max_new_tokens": 5},
        }
    )
    assert Rules.from_config(config).stages == BOTH
    config = parse_config({"task": {"environment": "calculator", "max_turns": 3}, "sampling": {"max_new_tokens": 5}})
    assert (Rules.from_config(config).stages, Rules.from_config(config).max_new_tokens) == ((), 15)


def test_an_older_checkpoint_is_a_sentence(tmp_path):
    save(freeze(submitted()), tmp_path)
    text = (tmp_path / "ledger.json").read_text()
    (tmp_path / "ledger.json").write_text(text.replace('"schema": 5', '"schema": 4'))
    with pytest.raises(ConfigError, match="schema 4, this version reads 5"):
        thaw(load(tmp_path), rules(stages=BOTH), lambda o: o)
