from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from buffer_helpers import NUM_TASKS, annotation, answer, rules

from async_rl.buffer.curriculum import Curriculum
from async_rl.buffer.journal import freeze, load, save, thaw
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.opening import make_ledger
from async_rl.buffer.records import Limits
from async_rl.buffer.stream import task_index
from async_rl.config import parse_config

TASKS = 30
EASY, MIDDLE, HARD = range(10), range(10, 20), range(20, 30)


def curriculum(seed: int = 3) -> Curriculum:
    return Curriculum(lambda position: task_index(seed, position, TASKS), seed)


def teach(plan: Curriculum, count: int, *, groups: int = 4, seed: int = 0) -> list[int]:
    """A learner that solves easy tasks always, hard ones never, the others half of the time; picks in order."""
    chance = np.random.default_rng(seed)
    picks = []
    for _ in range(count):
        task = plan.pick()
        rate = 1.0 if task in EASY else 0.0 if task in HARD else 0.5
        plan.observe(task, (chance.random(groups) < rate).astype(np.float32))
        picks.append(task)
    return picks


def test_every_task_is_seen_once_before_any_comes_twice():
    assert sorted(teach(curriculum(), TASKS)) == list(range(TASKS))


def test_tasks_that_are_solved_sometimes_come_more_often_and_none_starves():
    picks = Counter(teach(curriculum(), 1200)[TASKS:])
    middle = sum(picks[t] for t in MIDDLE)
    assert middle > 0.7 * picks.total(), "they are a third of the tasks"
    assert min(picks[t] for t in range(TASKS)) >= 3


def test_the_weight_is_four_p_times_one_minus_p_of_the_decayed_pass_rate_and_never_below_the_floor():
    plan = curriculum()
    assert plan.weight(5) == 1.0
    plan.observe(5, np.float32([1, 1, 1, 0]))
    assert plan.weight(5) == pytest.approx(4 * 0.75 * 0.25)
    plan.observe(5, np.float32([0, 0, 0, 0]))
    rate = 0.7 * 0.75 / (0.7 + 1)  # the older group counts 0.7
    assert plan.weight(5) == pytest.approx(4 * rate * (1 - rate))
    plan.observe(6, np.float32([1, 1]))
    assert plan.weight(6) == 0.1


def test_a_task_that_becomes_easy_is_left_and_one_that_comes_into_reach_is_found():
    plan = curriculum()
    for _ in range(5):
        plan.observe(0, np.float32([1, 0]))
        plan.observe(1, np.float32([0, 0]))
    for _ in range(8):
        plan.observe(0, np.float32([1, 1]))
        plan.observe(1, np.float32([1, 0]))
    # p of task 0: 1 - 0.5 * 0.7^8 * (1 - 0.7^5) / (1 - 0.7^13) = 0.976
    assert plan.weight(0) == 0.1
    assert plan.weight(1) > 0.99


def test_the_same_events_give_the_same_picks_and_another_seed_others():
    assert teach(curriculum(), 200) == teach(curriculum(), 200)
    assert teach(curriculum(), 200) != teach(curriculum(4), 200)


def test_a_restored_curriculum_goes_on_with_the_same_picks():
    plan = curriculum()
    teach(plan, 100)
    back = curriculum()
    back.restore(plan.to_plain())
    assert teach(back, 100, seed=1) == teach(plan, 100, seed=1)


def test_without_a_curriculum_the_stream_is_as_it_was_and_with_one_too_until_something_is_known():
    plain = make_ledger(parse_config({"seed": 3}), Limits(num_tasks=TASKS), None)
    asked = make_ledger(parse_config({"seed": 3, "task": {"curriculum": True}}), Limits(num_tasks=TASKS), None)
    assert plain.curriculum is None
    for ordinal in range(4):
        tickets = [books.issue("a", 0, 0.0) for books in (plain, asked)]
        assert [t.task_index for t in tickets if t] == [task_index(3, ordinal, TASKS)] * 2


def ledger_with_curriculum(**changes) -> Ledger:
    plan = Curriculum(lambda position: position % NUM_TASKS, 0)
    return Ledger(rules(max_staleness=2, **changes), lambda ordinal: ordinal % NUM_TASKS, plan)


def test_the_ledger_tells_of_every_group_whose_rewards_are_known_filtered_ones_included():
    books = ledger_with_curriculum(replace_zero_variance=True)
    for rewards in ((1.0, 1.0), (0.0, 1.0), (float("nan"), 1.0)):
        ticket = books.issue("a", 0, 0.0)
        assert ticket is not None
        books.submit("a", answer(ticket, rewards=rewards), 0.0)
    assert books.curriculum is not None
    assert [books.curriculum.weight(t) for t in range(3)] == [0.1, 1.0, 1.0]
    assert [task for task, *_ in books.curriculum.to_plain()["records"]] == [0, 1]


def test_the_ledger_tells_of_rewards_when_their_stage_gives_them_and_of_no_other_stage():
    books = ledger_with_curriculum(stages=("reward", "reference"))
    ticket = books.issue("a", 0, 0.0)
    assert ticket is not None
    books.submit("a", answer(ticket), 0.0)
    assert books.curriculum is not None
    for stage, known in (("reference", 0), ("reward", 1), ("reward", 1)):
        group = books.scoring.lease(stage, "s", 0.0)
        if group is not None:
            books.annotate("s", annotation(group, stage), 0.0)
        assert len(books.curriculum.to_plain()["records"]) == known


def test_a_retry_keeps_its_task_and_a_resumed_ledger_picks_what_the_old_one_would_have(tmp_path):
    books = ledger_with_curriculum(steps=40)
    known = [books.issue("a", 0, 0.0) for _ in range(6)]
    for ticket in known[:4]:
        assert ticket is not None
        books.submit("a", answer(ticket, rewards=(1.0, 1.0)), 0.0)
    books.fail("a", 4, 0, "engine_error", final=False)  # 5 stays open
    save(freeze(books), tmp_path)
    fresh = Curriculum(lambda position: position % NUM_TASKS, 0)
    back = thaw(load(tmp_path), books.rules, lambda o: 0, fresh)
    books.lose("a")
    picks = []
    for ledger in (books, back):
        for step in (0, 1):
            ledger.deliver()
            ledger.train(step)
        tickets = [ledger.issue("b", 2, 0.0) for _ in range(6)]
        picks.append([(t.ordinal, t.attempt, t.task_index) for t in tickets if t])
    assert picks[0] == picks[1]
    assert picks[0][:2] == [(4, 1, 4), (5, 1, 5)]
    assert len(picks[0]) == 6


def test_a_curriculum_that_begins_with_a_resume_goes_on_in_the_stream():
    books = Ledger(rules(), lambda ordinal: ordinal % NUM_TASKS)
    for _ in range(3):
        books.issue("a", 0, 0.0)
    plan = Curriculum(lambda position: position % NUM_TASKS, 0)
    back = thaw(freeze(books), books.rules, lambda o: 0, plan)
    tickets = [back.issue("a", 0, 0.0) for _ in range(4)]
    assert [(t.ordinal, t.task_index) for t in tickets if t] == [(0, 0), (1, 1), (2, 2), (3, 3)]
