"""What the ledger knows of deadlines without looking at each entry, against looking at each."""

from collections import Counter

import pytest
from buffer_helpers import answer, ledger, rules
from hypothesis import given
from hypothesis import strategies as st

from async_rl.buffer.policy import leaves_time
from async_rl.buffer.records import Entry
from async_rl.buffer.shelf import Shelf


def entry(ordinal, deadline, uses=0):
    return Entry(
        ordinal=ordinal, attempt=0, task_index=0, actor="a", version=0, deadline=deadline, issued_at=0.0, uses=uses
    )


def test_a_shelf_counts_never_trained_entries_by_deadline():
    shelf = Shelf()
    for ordinal, deadline, uses in ((0, 3, 0), (1, 3, 0), (2, 4, 0), (3, 3, 1)):
        shelf[ordinal] = entry(ordinal, deadline, uses)
    assert shelf.due == {3: 2, 4: 1}
    del shelf[0]
    assert shelf.pop(2).ordinal == 2
    assert shelf.pop(2, "nothing") == "nothing"
    assert shelf.pop(3).uses == 1
    assert dict(shelf.due) == {3: 1}
    with pytest.raises(RuntimeError, match="ordinal 1 is in this place already"):
        shelf[1] = entry(1, 5)


@given(
    st.lists(st.integers(0, 6), max_size=12),
    st.lists(st.integers(0, 6), max_size=12),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_counts_by_deadline_decide_as_looking_at_each_entry_does(waiting, ready, groups, step):
    rest = sorted(ready)[groups:]  # the step takes the most urgent
    each = all(sum(d <= deadline for d in [*waiting, *rest]) <= (deadline - step) * groups for deadline in set(waiting))
    assert leaves_time(rules(groups_per_step=groups), step, Counter(waiting), Counter(ready)) is each


def test_the_counts_of_a_ledger_follow_its_tickets():
    books = ledger(max_staleness=2, max_uses=2)
    tickets = [books.issue("a", 0, 0.0) for _ in range(4)]
    assert books.open.due == {2: 4}
    for ticket in tickets[:3]:
        books.submit("a", answer(ticket), 0.0)
    assert (books.open.due, books.ready.due) == ({2: 1}, {2: 3})
    books.deliver()
    assert books.ready.due == {2: 1}
    books.train(0)  # its two groups come back, and have been trained
    assert (len(books.ready), books.ready.due) == (3, {2: 1})
