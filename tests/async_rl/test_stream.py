from __future__ import annotations

import pytest

from async_rl.buffer.stream import task_index


def test_every_epoch_visits_each_task_once_in_another_order():
    first = [task_index(3, i, 50) for i in range(50)]
    second = [task_index(3, i, 50) for i in range(50, 100)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_the_stream_depends_on_seed_and_ordinal_only():
    forward = [task_index(1, i, 10) for i in range(100)]
    assert [task_index(1, i, 10) for i in reversed(range(100))] == forward[::-1]
    assert [task_index(2, i, 10) for i in range(100)] != forward


def test_a_stream_without_tasks_or_before_its_start_is_an_error():
    with pytest.raises(ValueError, match="0 tasks"):
        task_index(0, 0, 0)
    with pytest.raises(ValueError, match="ordinal -1"):
        task_index(0, -1, 5)
