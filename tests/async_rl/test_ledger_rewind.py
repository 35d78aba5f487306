from __future__ import annotations

import numpy as np
import pytest
from buffer_helpers import NUM_TASKS, annotation, answer, ledger, rules

from async_rl.buffer.curriculum import Curriculum
from async_rl.buffer.journal import freeze, load, save, thaw
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.records import Answer, Lost
from async_rl.buffer.undo import Undone, batch_row, undone
from async_rl.protocol import Ticket


def issue_all(books: Ledger, actor: str = "a") -> list[Ticket]:
    tickets = []
    while (ticket := books.issue(actor, books.version, 0.0)) is not None:
        tickets.append(ticket)
    return tickets


def submit_all(books: Ledger, tickets: list[Ticket], actor: str = "a") -> None:
    for ticket in tickets:
        assert books.submit(actor, answer(ticket), 0.0).outcome == "accepted"


def step(books: Ledger) -> dict[str, object]:
    """Deliver and train the next step; its row of batches.jsonl."""
    at = books.next_step
    assert books.deliver() is not None
    row = batch_row(at, books.delivered[at])
    books.train(at)
    return row


def keys(tickets: list[Ticket]) -> list[tuple[int, int, int]]:
    return [(t.ordinal, t.attempt, t.draw) for t in tickets]


def test_what_was_trained_since_is_told_from_the_rows_with_the_uses_that_remain():
    rows = [
        {"step": 0, "ordinals": [0, 1], "attempts": [0, 2], "task_indices": [5, 6]},
        {"step": 1, "ordinals": [1, 2], "attempts": [2, 0], "task_indices": [6, 7]},
        {"step": 2, "ordinals": [1, 3], "attempts": [2, 0], "task_indices": [6, 8]},
    ]
    assert undone(rows, 3) == []
    assert undone(rows, 2) == [Undone(1, 2, 6, 2), Undone(3, 0, 8, 0)]
    assert undone([*rows, rows[1]], 1) == [Undone(1, 2, 6, 1), Undone(2, 0, 7, 0), Undone(3, 0, 8, 0)]
    assert undone(rows, 0) == [Undone(0, 0, 5, 0), Undone(1, 2, 6, 0), Undone(2, 0, 7, 0), Undone(3, 0, 8, 0)]


def test_a_rewind_gives_back_what_was_trained_since_and_voids_what_newer_weights_sampled():
    books = ledger(max_staleness=2)  # (0 + 2 + 1 - 0) * 2 = 6 tickets at version 0
    submit_all(books, issue_all(books))
    rows = [step(books), step(books)]  # ordinals 0, 1 and 2, 3; 4 and 5 are ready
    at_2 = issue_all(books)  # 6, 7, 8, 9 at version 2
    submit_all(books, at_2[:2])
    tokens = books.tally.tokens["trained"]
    assert tokens == 8  # 4 groups of 2 sequences of 1 token
    lost = books.rewind(1, undone(rows, 1))
    assert lost == [Lost("a", 8, 0, "learner_restarted"), Lost("a", 9, 0, "learner_restarted")]
    assert (books.version, books.next_step, books.epoch) == (1, 1, 1)
    assert sorted(books.ready) == [4, 5]
    assert books.books() == {
        "issued": 10, "open": 0, "scoring": 0, "ready": 2, "delivered": 0, "trained": 2, "filtered": 0, "failed": 6,
    }  # fmt: skip
    assert books.failed == {"learner_restarted": 4, "void_version": 2}  # 2, 3, 8, 9 and 6, 7
    assert (books.tally.tokens["trained"], books.tally.sequences["trained"]) == (4, 4)
    assert books.tally.ages == {0: 4}  # step 0 at version 0; step 1 had age 1
    # (1 + 3 - 1) * 2 - 2 ready = 4
    assert keys(issue_all(books, "b")) == [(2, 1, 0), (3, 1, 0), (6, 1, 0), (7, 1, 0)]
    assert books.submit("a", answer(at_2[3]), 0.0) == Answer("late", "learner_restarted", fresh=True)


def test_a_learner_that_lost_nothing_gets_again_what_was_delivered():
    books = ledger(max_staleness=2)
    tickets = issue_all(books)
    submit_all(books, tickets[:4])
    row = step(books)
    books.deliver()
    assert books.rewind(1, undone([row], 1)) == []
    assert (books.epoch, books.next_step, sorted(books.ready), sorted(books.open)) == (0, 1, [2, 3], [4, 5])
    delivery = books.deliver()
    assert delivery is not None
    assert (delivery.step, [g.ordinal for g in delivery.groups]) == (1, [2, 3])


def test_uses_in_steps_that_stay_remain_and_an_attempt_is_never_used_more_often():
    books = ledger(max_staleness=4, groups_per_step=1, max_uses=2)
    submit_all(books, issue_all(books)[:1])
    for ticket in list(books.open):
        books.fail("a", ticket, 0, "x", final=True)
    rows = [step(books), step(books)]  # ordinal 0 twice: it is retired
    assert books.trained == 1
    books.rewind(1, undone(rows, 1))
    assert (books.trained, books.books()["ready"], books.failed.total()) == (1, 0, 0)  # one use stays, so it stays

    books = ledger(max_staleness=4, groups_per_step=1, max_uses=3)
    submit_all(books, issue_all(books)[:1])
    for ticket in list(books.open):
        books.fail("a", ticket, 0, "x", final=True)
    rows = [step(books), step(books)]
    assert books.ready[0].uses == 2
    books.rewind(1, undone(rows, 1))
    assert books.ready[0].uses == 1
    books.rewind(0, undone(rows[:1], 0))
    assert books.ready[0].uses == 0
    assert books.epoch == 2


def test_a_rewind_to_the_start_trains_nothing_however_long_ago_that_was(monkeypatch):
    monkeypatch.setattr("async_rl.buffer.undo.KEPT_STEPS", 2)
    books = ledger(max_staleness=0)
    rows = []
    for _ in range(4):
        submit_all(books, issue_all(books))
        rows.append(step(books))
    assert books.trained == 8
    books.rewind(0, undone(rows, 0))
    assert (books.trained, books.failed, books.tally.ages) == (0, {"learner_restarted": 8}, {})
    assert (books.tally.sequences["trained"], books.tally.tokens["trained"]) == (0, 0)
    assert [t.ordinal for t in issue_all(books)] == [0, 1]


def test_only_what_was_trained_can_be_undone_and_nobody_can_be_ahead():
    for ahead, item, why in (
        (2, None, "the newest version is 1"),
        (0, Undone(2, 0, 0, 0), "was never trained"),  # it is ready
        (0, Undone(99, 0, 0, 0), "was never trained"),  # it was never issued
    ):
        books = ledger()
        submit_all(books, issue_all(books))
        step(books)
        with pytest.raises(RuntimeError, match=why):
            books.rewind(ahead, [item] if item else [])


def test_a_group_in_scoring_is_void_too_and_its_scorer_is_late():
    books = ledger(max_staleness=1, stages=("reward",))
    for ticket in issue_all(books)[:2]:
        group = answer(ticket)
        books.submit("a", group, 0.0)
        assert books.lease("reward", "s", 0.0) is not None
        books.annotate("s", annotation(group, "reward"), 0.0)
    row = step(books)
    books.lose("a")
    (new,) = [t for t in issue_all(books) if t.ordinal == 4]
    books.submit("a", answer(new), 0.0)
    assert books.lease("reward", "s", 0.0) is not None
    books.rewind(0, undone([row], 0))
    assert (len(books.scoring), books.failed["void_version"]) == (0, 1)
    assert books.annotate("s", annotation(answer(new), "reward"), 0.0).outcome == "late"
    assert books.scoring.queues["reward"].leases["s"] == 0


# ---------------------------------------------------------------------- draws


def test_only_what_fails_by_its_content_is_drawn_anew():
    books = ledger(groups_per_step=1, max_staleness=0, lease_s=10.0, watchdog_s=20.0)

    def again(now: float = 0.0) -> Ticket:
        ticket = books.issue("a", 0, now)
        assert ticket is not None
        return ticket

    ticket = again()
    assert ticket.draw == 0
    assert Ticket.from_wire(ticket.to_wire()) == ticket
    assert books.submit("a", answer(ticket, rewards=(0.0,)), 0.0).reason == "wrong_group_size"
    ticket = again()
    assert (ticket.attempt, ticket.draw) == (1, 1)
    books.fail("a", 0, 1, "verifier", final=False)
    ticket = again()
    assert (ticket.attempt, ticket.draw) == (2, 2)
    books.lose("a")
    ticket = again()
    assert (ticket.attempt, ticket.draw) == (3, 2)
    books.expire(11.0)
    ticket = again(11.0)
    assert (ticket.attempt, ticket.draw) == (4, 2)
    books.rewind(0, [])
    books.lose("a", "asleep")
    books = thaw(freeze(books), rules(groups_per_step=1, max_staleness=0), lambda o: o)
    ticket = again()
    assert (ticket.attempt, ticket.draw) == (5, 2)
    books = thaw(freeze(books), rules(groups_per_step=1, max_staleness=0), lambda o: o)  # open: failed as resumed
    ticket = again()
    assert (ticket.attempt, ticket.draw) == (6, 2)


def test_what_is_undone_is_drawn_as_it_was_also_after_a_resume(tmp_path):
    books = ledger(max_staleness=0)
    tickets = issue_all(books)
    books.fail("a", 1, 0, "environment", final=False)
    submit_all(books, [tickets[0], *issue_all(books)])
    row = step(books)
    assert row["attempts"] == [0, 1]
    save(freeze(books), tmp_path)
    back = thaw(load(tmp_path), rules(max_staleness=0), lambda o: o % NUM_TASKS)
    for each in (books, back):
        each.rewind(0, undone([row], 0))
        assert keys(issue_all(each)) == [(0, 1, 0), (1, 2, 1)]


def test_a_held_group_keeps_its_draw_through_a_checkpoint(tmp_path):
    books = ledger(max_staleness=0)
    issue_all(books)
    books.fail("a", 0, 0, "environment", final=False)
    submit_all(books, issue_all(books))
    save(freeze(books), tmp_path)
    back = thaw(load(tmp_path), rules(max_staleness=0), lambda o: o % NUM_TASKS)
    assert back.ready[0].draw == 1


# ---------------------------------------------------------------------- curriculum


def test_the_curriculum_hears_once_of_what_is_sampled_again():
    def run(*, dies: bool) -> Curriculum:
        curriculum = Curriculum(lambda position: position % 3, seed=1)
        books = Ledger(rules(max_staleness=0), lambda o: 0, curriculum)
        rows = []
        for _ in range(4):
            submit_all(books, issue_all(books))
            rows.append(step(books))
            if dies and books.version == 2 and not books.epoch:
                books.rewind(1, undone(rows, 1))
                rows.pop()
                submit_all(books, issue_all(books))
                rows.append(step(books))
        return curriculum

    assert run(dies=True).to_plain() == run(dies=False).to_plain()
    assert np.isfinite(run(dies=True).weight(0))
