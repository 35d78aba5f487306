"""The queue between an engine's thread and the one that steps it, and version spans."""

import select
import threading
from types import SimpleNamespace

import pytest

from actors.engines.inbox import Inbox
from actors.engines.vllm_engine import expand_versions
from async_rl.errors import AsyncRLError, StartAgainError


def readable(inbox):
    return bool(select.select([inbox.fileno()], [], [], 0)[0])


def test_it_is_readable_exactly_while_something_is_there():
    inbox = Inbox()
    assert not readable(inbox)
    inbox.put([])
    assert not readable(inbox)
    inbox.put([1, 2])
    inbox.put([3])
    assert readable(inbox)
    assert inbox.take(0.0) == [1, 2, 3]
    assert not readable(inbox)
    assert inbox.take(0.0) == []
    inbox.close()


def test_a_waiting_consumer_is_woken_by_another_thread():
    inbox = Inbox()
    thread = threading.Thread(target=inbox.put, args=([7],))
    thread.start()
    assert inbox.take(30.0) == [7]
    thread.join()
    inbox.close()


def test_after_a_failure_every_take_gives_the_first_reason_and_the_process_is_started_again():
    inbox = Inbox()
    inbox.put([1])
    inbox.fail("it died")
    inbox.fail("then this")
    assert readable(inbox)
    for _ in range(2):
        with pytest.raises(StartAgainError, match="it died"):
            inbox.take(30.0)
    assert readable(inbox)
    inbox.close()
    inbox.put([2])
    inbox.fail("after close")


def spans(*triples):
    return [SimpleNamespace(version=v, start=s, end=e) for v, s, e in triples]


def test_spans_become_one_version_per_token():
    assert expand_versions(spans(("4", 0, 2), ("7", 2, 5)), 5).tolist() == [4, 4, 7, 7, 7]
    assert expand_versions([], 0).tolist() == []


@pytest.mark.parametrize(
    "wrong",
    [
        spans(),
        spans(("4", 0, 4)),
        spans(("4", 0, 6)),
        spans(("4", 1, 5)),
        spans(("4", 0, 2), ("5", 3, 5)),
        spans(("4", 0, 3), ("5", 2, 5)),
        spans(("default", 0, 5)),
    ],
)
def test_spans_that_leave_a_token_without_a_version_are_refused(wrong):
    with pytest.raises(AsyncRLError, match="do not cover 5 tokens"):
        expand_versions(wrong, 5)
