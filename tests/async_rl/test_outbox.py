import select

import numpy as np
from buffer_helpers import annotation, make

from async_rl.outbox import MOST_TOGETHER, Outbox, together


def large(ordinal):
    """A group of more bytes than may go together."""
    return make(ordinal, versions=np.zeros(MOST_TOGETHER // 4, int).tolist(), rewards=(1.0,))


def test_small_groups_that_wait_together_are_one_message_and_all_else_stays_as_it_was_put():
    first, second, third, fourth, big = make(0), make(1), make(2), make(3), large(4)
    commands = [
        ("submit", {}, [first]),
        ("submit", {}, [second, third]),
        ("credit", {"count": 3}, []),
        ("submit", {}, [fourth]),
        ("submit", {"x": 1}, [first]),
        ("submit", {"x": 1}, [big]),
        ("submit", {"x": 1}, [second]),
        ("annotate", {}, [annotation(make(5), "reward")]),
        ("annotate", {}, [annotation(make(6), "reward")]),
    ]
    joined = together(commands)
    assert joined[0] == ("submit", {}, [first, second, third])
    assert joined[1:] == [*commands[2:]]


def test_what_is_joined_stays_below_the_limit():
    group = make(0)
    most = MOST_TOGETHER // group.nbytes
    joined = together([("submit", {}, [group])] * (2 * most + 1))
    assert [len(payload) for _, _, payload in joined] == [most, most, 1]


def test_the_descriptor_tells_of_a_message_until_it_is_cleared():
    box = Outbox()

    def is_readable():
        return bool(select.select([box], [], [], 0)[0])

    assert not is_readable()
    box.put(("credit", {"count": 1}, []))
    assert is_readable()
    box.clear()
    assert not is_readable()
    assert box.take() == [("credit", {"count": 1}, [])]
    assert box.take() == []
    box.clear()  # nothing to clear is no error
    box.wake()
    assert is_readable()
    box.close()
