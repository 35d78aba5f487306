from __future__ import annotations

import math

import numpy as np
import pytest
from buffer_helpers import NUM_TASKS, answer, ledger, make, rules

from async_rl.buffer.journal import Frozen, freeze, load, save, thaw
from async_rl.buffer.ledger import Ledger
from async_rl.errors import ConfigError
from async_rl.protocol import Ticket


def issue_all(books: Ledger, version: int = 0, actor: str = "a", now: float = 0.0) -> list[Ticket]:
    tickets = []
    while (ticket := books.issue(actor, version, now)) is not None:
        tickets.append(ticket)
    return tickets


def submit_all(books: Ledger, tickets: list[Ticket], actor: str = "a") -> None:
    for ticket in tickets:
        assert books.submit(actor, answer(ticket), 0.0).outcome == "accepted"


@pytest.mark.parametrize(("eta", "expected"), [(0, 2), (1, 4), (4, 10)])
def test_at_the_start_eta_plus_one_steps_of_tickets_are_admitted(eta, expected):
    # (version 0 + eta + 1 - next_step 0) * 2 groups a step
    books = ledger(max_staleness=eta)
    assert len(issue_all(books)) == expected
    assert books.books()["open"] == expected


def test_admission_counts_from_the_actors_own_version():
    books = ledger(max_staleness=1)
    submit_all(books, issue_all(books))  # 4 ready
    assert books.deliver() is not None  # step 0 takes 2; next_step = 1
    assert books.issue("a", 0, 0.0) is None  # (0 + 2 - 1) * 2 = 2 = ready
    books.train(0)
    assert books.issue("behind", 0, 0.0) is None  # still 2
    assert len(issue_all(books, version=1)) == 2  # (1 + 2 - 1) * 2 = 4


def test_with_eta_zero_an_actor_needs_the_newest_version():
    books = ledger(max_staleness=0)
    submit_all(books, issue_all(books))
    books.deliver()
    books.train(0)
    assert books.issue("a", 0, 0.0) is None
    assert len(issue_all(books, version=1)) == 2


def test_no_more_tickets_than_the_rest_of_the_run_needs():
    books = ledger(max_staleness=10, steps=3)
    assert len(issue_all(books)) == 6


def test_an_actor_ahead_of_the_newest_version_is_a_fault_of_ours():
    with pytest.raises(RuntimeError, match="newest is 0"):
        ledger().issue("a", 1, 0.0)


def test_held_bytes_stop_tickets_but_never_below_one_step():
    books = ledger(max_staleness=3, max_bytes=1)
    submit_all(books, issue_all(books))
    assert books.outstanding == 8
    books.deliver()
    assert books.held_bytes == 8 * make(0).nbytes
    books.train(0)
    assert books.issue("a", 1, 0.0) is None  # full, 6 outstanding
    for step in (1, 2):
        books.deliver()
        books.train(step)
    assert books.outstanding == 2
    books.deliver()
    assert books.outstanding == 0
    assert len(issue_all(books, version=3)) == 2


def test_the_batch_is_in_ordinal_order_and_the_oldest_go_first():
    books = ledger(max_staleness=2)
    tickets = issue_all(books)  # ordinals 0..5 at version 0
    for ticket in reversed(tickets):
        books.submit("a", answer(ticket), 0.0)
    delivery = books.deliver()
    assert delivery is not None
    assert [g.ordinal for g in delivery.groups] == [0, 1]


def test_a_step_waits_for_the_attempt_whose_deadline_it_is():
    books = ledger(max_staleness=1)
    tickets = issue_all(books)  # 0..3, deadline step 1
    submit_all(books, tickets[:3])
    assert books.deliver() is not None  # step 0: 0, 1
    books.train(0)
    submit_all(books, issue_all(books, version=1))  # 4, 5, deadline step 2
    assert len(books.ready) == 3
    assert books.deliver() is None  # ordinal 3 is open and must be trained at step 1
    submit_all(books, tickets[3:])
    delivery = books.deliver()
    assert delivery is not None
    assert [g.ordinal for g in delivery.groups] == [2, 3]


def test_a_step_waits_when_too_much_open_work_would_be_due_at_the_next_one():
    books = ledger(max_staleness=2)
    old = issue_all(books)  # 0..5, deadline step 2
    submit_all(books, old[:2])
    books.deliver()
    books.train(0)
    young = issue_all(books, version=1)  # 6, 7, deadline step 3
    submit_all(books, young)
    # Step 1 with 6 and 7 would leave four groups due at step 2, which takes two.
    assert books.deliver() is None
    submit_all(books, old[2:4])
    delivery = books.deliver()
    assert delivery is not None
    assert [g.ordinal for g in delivery.groups] == [2, 3]


def test_reissue_does_not_wait_and_cancels_what_comes_too_late():
    books = ledger(max_staleness=1, stragglers="reissue")
    tickets = issue_all(books)
    submit_all(books, tickets[:3])
    books.deliver()
    books.train(0)
    submit_all(books, issue_all(books, version=1))
    delivery = books.deliver()  # step 1: 2 is the oldest, then 4
    assert delivery is not None
    assert [g.ordinal for g in delivery.groups] == [2, 4]
    assert [(x.ordinal, x.attempt, x.reason) for x in delivery.lost] == [(3, 0, "straggler")]
    books.train(1)
    again = books.issue("a", 2, 0.0)
    assert again is not None
    assert (again.ordinal, again.attempt, again.version) == (3, 1, 2)
    late = books.submit("a", answer(tickets[3]), 0.0)
    assert (late.outcome, late.reason) == ("late", "straggler")
    assert books.tally.tokens["lost"] == 2


def test_ready_groups_that_no_step_has_room_for_are_cut_and_issued_again():
    books = ledger(max_staleness=1, stragglers="reissue")
    old = issue_all(books)  # 0..3, deadline 1
    submit_all(books, old[2:])
    books.deliver()  # step 0 takes 2 and 3
    books.train(0)
    submit_all(books, issue_all(books, version=1))  # 4, 5
    books.deliver()  # step 1 takes 4, 5; 0 and 1 are lost
    assert books.failed == {"straggler": 2}
    assert books.books()["ready"] == 0


def test_a_group_may_be_trained_twice_inside_its_bound_but_fresh_groups_go_first():
    books = ledger(max_staleness=1, max_uses=2, steps=3)
    submit_all(books, issue_all(books)[:3])
    books.deliver()  # 0, 1; 3 is open
    books.train(0)
    assert books.books()["ready"] == 3  # 2 fresh, 0 and 1 again
    books.lose("a")
    delivery = books.deliver()
    assert delivery is not None
    assert [g.ordinal for g in delivery.groups] == [0, 2]
    assert books.trained == 1  # 1 is at age 2 at step 2: retired with one use
    books.train(1)
    assert books.trained == 3  # 0 used twice; 2 is too old for step 2


def test_a_repeated_submit_gets_the_same_answer_and_counts_once():
    books = ledger()
    (ticket, *_) = issue_all(books)
    first = books.submit("a", answer(ticket), 0.0)
    second = books.submit("a", answer(ticket), 0.0)
    assert (first.outcome, first.fresh, second.outcome, second.fresh) == ("accepted", True, "accepted", False)
    assert books.books()["ready"] == 1


def test_a_lease_that_runs_out_is_issued_again_with_the_next_attempt_and_its_late_group_is_not_counted():
    books = ledger(max_staleness=0, lease_s=10)
    first, _ = issue_all(books, now=0.0)
    assert books.expire(10.0) == []
    assert [(x.ordinal, x.actor) for x in books.expire(10.5)] == [(0, "a"), (1, "a")]
    again = books.issue("b", 0, 11.0)
    assert again is not None
    assert (again.ordinal, again.attempt) == (0, 1)
    assert books.submit("a", answer(first), 12.0).outcome == "late"
    assert books.submit("a", answer(first), 12.0).outcome == "late"
    assert books.tally.sequences["lost"] == 2
    assert books.submit("b", answer(again), 12.0).outcome == "accepted"
    assert books.failed == {"lease_expired": 2}


def test_a_lost_actor_returns_its_tickets_at_once():
    books = ledger(max_staleness=0)
    books.issue("a", 0, 0.0)
    books.issue("b", 0, 0.0)
    assert [(x.actor, x.ordinal) for x in books.lose("a")] == [("a", 0)]
    ticket = books.issue("b", 0, 0.0)
    assert ticket is not None
    assert (ticket.ordinal, ticket.attempt) == (0, 1)
    assert books.leases == {"b": 2}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rewards": (0.0, 1.0, 1.0)}, "wrong_group_size"),
        ({"task_index": 6}, "wrong_task"),
        ({"versions": (0, 1)}, "version_from_the_future"),
    ],
)
def test_a_group_that_contradicts_its_ticket_is_refused_and_issued_again(change, reason):
    books = ledger()
    (ticket, *_) = issue_all(books)
    group = make(ticket.ordinal, **change)
    refused = books.submit("a", group, 0.0)
    assert (refused.outcome, refused.reason) == ("refused", reason)
    assert books.failed == {reason: 1}
    again = books.issue("a", 0, 0.0)
    assert again is not None
    assert (again.ordinal, again.attempt) == (0, 1)


def test_tokens_older_than_the_ticket_are_refused():
    books = ledger()
    submit_all(books, issue_all(books)[:2])
    books.deliver()
    books.train(0)
    books.lose("a")
    ticket = books.issue("a", 1, 0.0)
    assert ticket is not None
    assert books.submit("a", answer(ticket, versions=(0, 1)), 0.0).reason == "version_older_than_ticket"


def test_arrays_that_contradict_each_other_are_refused():
    books = ledger()
    first, second, third, _ = issue_all(books)
    group = answer(first)
    mask = np.ones_like(group.arrays["loss_mask"])
    object.__setattr__(group, "arrays", {**group.arrays, "loss_mask": mask})
    assert books.submit("a", group, 0.0).reason == "mask_contradicts_versions"
    group = answer(second)
    object.__setattr__(group, "arrays", {"versions": group.arrays["versions"]})
    assert books.submit("a", group, 0.0).reason == "missing_array"
    group = answer(third)
    bad = np.full_like(group.arrays["logprobs"], math.nan)
    object.__setattr__(group, "arrays", {**group.arrays, "logprobs": bad})
    assert books.submit("a", group, 0.0).reason == "bad_logprobs"


@pytest.mark.parametrize(
    ("array", "index", "value", "reason"),
    [
        ("tokens", 1, 50, "token_outside_vocabulary"),
        ("tokens", 0, -1, "token_outside_vocabulary"),
        ("logprobs", 2, 0.5, "bad_logprobs"),
        ("logprobs", 2, -1e30, "bad_logprobs"),
        ("loss_mask", 0, 1, "no_prompt"),
        ("loss_mask", 1, 1, "too_many_tokens"),
    ],
)
def test_what_the_learner_could_not_compute_with_is_refused(array, index, value, reason):
    books = ledger(vocabulary=50, context=3, max_new_tokens=1)
    (ticket, *_) = issue_all(books)
    group = answer(ticket)  # two trajectories: two prompt tokens, one sampled
    arrays = {name: values.copy() for name, values in group.arrays.items()}
    arrays[array][index] = value
    if array == "loss_mask":
        arrays["versions"][index] = 0
    object.__setattr__(group, "arrays", arrays)
    assert books.submit("a", group, 0.0).reason == reason
    assert books.failed == {reason: 1}


def test_every_trajectory_must_hold_a_sampled_token_and_fit_the_model():
    books = ledger(vocabulary=50, context=3, max_new_tokens=2)
    first, second, *_ = issue_all(books)
    assert books.submit("a", answer(first, versions=(0, 0)), 0.0).reason == "too_long"
    group = answer(second)
    arrays = {name: values.copy() for name, values in group.arrays.items()}
    arrays["loss_mask"][:3], arrays["versions"][:3] = 0, -1
    object.__setattr__(group, "arrays", arrays)
    assert books.submit("a", group, 0.0).reason == "nothing_sampled"


def test_useless_groups_are_filtered_and_a_fresh_ordinal_takes_their_place():
    books = ledger(max_staleness=0, replace_zero_variance=True)
    first, second = issue_all(books)
    assert books.submit("a", answer(first, rewards=(1.0, 1.0)), 0.0).reason == "zero_variance"
    assert books.submit("a", answer(second, rewards=(math.nan, 1.0)), 0.0).reason == "bad_reward"
    assert books.filtered == {"zero_variance": 1, "bad_reward": 1}
    assert [(t.ordinal, t.attempt) for t in issue_all(books)] == [(2, 0), (3, 0)]


def test_zero_variance_is_trained_unless_it_is_to_be_replaced():
    books = ledger()
    (ticket, *_) = issue_all(books)
    assert books.submit("a", answer(ticket, rewards=(1.0, 1.0)), 0.0).outcome == "accepted"


def test_a_final_failure_filters_and_another_is_tried_again():
    books = ledger(max_staleness=0)
    issue_all(books)
    assert books.fail("a", 0, 0, "verifier_timeout", final=True).outcome == "filtered"
    assert books.fail("a", 1, 0, "engine_error", final=False).outcome == "failed"
    assert books.fail("a", 1, 0, "engine_error", final=False).outcome == "failed"
    assert [(t.ordinal, t.attempt) for t in issue_all(books)] == [(1, 1), (2, 0)]
    assert (books.filtered, books.failed) == ({"verifier_timeout": 1}, {"engine_error": 1})


def test_what_was_never_issued_or_belongs_to_another_is_refused_and_changes_nothing():
    books = ledger()
    issue_all(books)
    before = books.books()
    assert books.submit("a", make(99), 0.0).reason == "never_issued"
    assert books.submit("a", make(0, 5), 0.0).reason == "never_issued"
    assert books.submit("b", make(0), 0.0).reason == "held_by_another"
    assert books.books() == before


def test_the_watchdog_names_the_oldest_tickets_reissues_them_and_gives_up_after_its_rounds():
    books = ledger(watchdog_s=10, watchdog_rounds=2, lease_s=1000)
    assert books.watch(0.0, step_waits=False) is None
    books.issue("slow", 0, 0.0)
    assert books.watch(10.0, step_waits=False) is None
    first = books.watch(10.5, step_waits=False)
    assert first is not None
    assert (first.round, first.exhausted) == (1, False)
    assert [(r.actor, r.ordinal, r.age_s, r.state) for r in first.table] == [("slow", 0, 10.5, "open")]
    assert [(x.ordinal, x.reason) for x in first.lost] == [(0, "watchdog")]
    again = books.issue("slow", 0, 11.0)
    assert again is not None
    assert again.attempt == 1
    assert books.watch(20.0, step_waits=False) is None
    second = books.watch(21.0, step_waits=False)
    assert second is not None
    assert (second.round, second.exhausted) == (2, True)


def test_an_accepted_group_calms_the_watchdog_and_an_expired_lease_stays_in_its_table():
    books = ledger(watchdog_s=10, watchdog_rounds=2, lease_s=9)
    books.watch(0.0, step_waits=True)
    ticket = books.issue("a", 0, 0.0)
    assert ticket is not None
    assert books.submit("a", answer(ticket), 8.0).outcome == "accepted"
    assert books.watch(17.0, step_waits=True) is None
    books.issue("b", 0, 8.0)
    books.expire(17.5)
    overdue = books.watch(18.5, step_waits=True)
    assert overdue is not None
    assert [(r.actor, r.state) for r in overdue.table] == [("b", "expired")]


def test_nobody_asking_while_a_step_waits_is_overdue_too_but_idleness_is_not():
    books = ledger(watchdog_s=10)
    books.watch(0.0, step_waits=False)
    assert books.watch(100.0, step_waits=False) is None
    assert books.watch(105.0, step_waits=True) is None
    overdue = books.watch(111.0, step_waits=True)
    assert overdue is not None
    assert overdue.table == ()


def test_steps_are_trained_once_and_in_order():
    books = ledger()
    submit_all(books, issue_all(books))
    books.deliver()
    books.deliver()
    with pytest.raises(RuntimeError, match="next is 0"):
        books.train(1)
    books.train(0)
    with pytest.raises(RuntimeError, match="next is 1"):
        books.train(0)


def test_the_end_of_the_run_closes_the_books():
    books = ledger()
    submit_all(books, issue_all(books)[:3])
    books.deliver()
    books.train(0)
    lost = books.close("run_ended")
    assert [(x.ordinal, x.reason) for x in lost] == [(3, "run_ended")]
    assert books.books() == {
        "issued": 4, "open": 0, "scoring": 0, "ready": 0, "delivered": 0, "trained": 2, "filtered": 0, "failed": 2,
    }  # fmt: skip
    assert books.held_bytes == 0


def test_a_checkpoint_restores_frontier_and_groups_and_reissues_what_was_open(tmp_path):
    books = ledger(max_staleness=2)
    submit_all(books, issue_all(books)[:4])  # 4 and 5 stay open
    books.deliver()
    books.train(0)
    books.deliver()  # step 1 is delivered, not trained: ready again after the resume
    save(freeze(books), tmp_path)
    back = thaw(load(tmp_path), rules(max_staleness=2), lambda o: o % NUM_TASKS)
    assert (back.version, back.next_step, back.next_ordinal) == (1, 1, 6)
    assert back.books() == {
        "issued": 6, "open": 0, "scoring": 0, "ready": 2, "delivered": 0, "trained": 2, "filtered": 0, "failed": 2,
    }  # fmt: skip
    assert [(t.ordinal, t.attempt) for t in issue_all(back, version=1)] == [(4, 1), (5, 1), (6, 0), (7, 0)]
    delivery = back.deliver()
    assert delivery is not None
    assert [g.ordinal for g in delivery.groups] == [2, 3]
    np.testing.assert_array_equal(delivery.groups[0].arrays["tokens"], make(2).arrays["tokens"])
    assert back.submit("a", make(4), 0.0).outcome == "late"


def test_a_damaged_checkpoint_is_a_sentence(tmp_path):
    books = ledger()
    submit_all(books, issue_all(books))
    save(freeze(books), tmp_path)
    data = (tmp_path / "groups.bin").read_bytes()
    (tmp_path / "groups.bin").write_bytes(data[:-3])
    with pytest.raises(ConfigError, match="damaged"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="cannot resume"):
        load(tmp_path / "none")
    frozen = freeze(books)
    with pytest.raises(ConfigError, match="does not belong"):
        thaw(Frozen(frozen.fields, frozen.groups[:-1]), rules(), lambda o: o)
    with pytest.raises(ConfigError, match="schema 9"):
        thaw(Frozen({**frozen.fields, "schema": 9}, frozen.groups), rules(), lambda o: o)
    fields = {k: v for k, v in frozen.fields.items() if k != "tally"}
    with pytest.raises(ConfigError, match="damaged"):
        thaw(Frozen(fields, frozen.groups), rules(), lambda o: o)
