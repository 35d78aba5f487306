"""Ranks of several hosts find each other at the server, life after life; who cannot take part is told why."""

import pytest

from async_rl.buffer.muster import NOTICE_S, Muster
from async_rl.buffer.post import Post
from async_rl.buffer.roster import Session
from async_rl.errors import WireError
from async_rl.wire import unpack_header

SETTINGS = {"learner.lr": "0.1", "steps": "5"}


class Place:
    """A muster and what it sends, by identity."""

    def __init__(self):
        self.post = Post()
        self.muster = Muster(self.post, SETTINGS)

    def come(self, rank, world=2, host="a", store="", settings=None, now=0.0, identity=None):
        session = Session(
            identity=identity or f"{rank}{host}".encode(),
            name=f"rank{rank}",
            role="recruit",
            rank=rank,
            world=world,
            pid=1,
            host=host,
            heard=now,
            seq=1,
        )
        header = {"type": "muster", "store": store, "settings": SETTINGS if settings is None else settings}
        self.muster.come(session, header, now)
        return session

    def sent(self):
        return [(identity, unpack_header(frames[0])) for identity, frames in self.post.take()]


@pytest.fixture
def place():
    return Place()


def test_the_last_rank_brings_all_to_the_store_of_rank_0(place):
    place.come(1, host="b")
    assert place.sent() == []
    place.come(0, store="10.0.0.1:7")
    told = place.sent()
    assert sorted(identity for identity, _ in told) == [b"0a", b"1b"]
    assert {(header["type"], header["store"]) for _, header in told} == {("mustered", "10.0.0.1:7")}


def test_every_life_has_a_store_of_its_own(place):
    for port in (7, 8):
        place.come(0, store=f"h:{port}")
        place.come(1)
        assert {header["store"] for _, header in place.sent()} == {f"h:{port}"}


def test_a_rank_whose_process_died_while_it_waited_is_replaced(place):
    gone = place.come(0, store="h:7", identity=b"dead")
    place.come(0, store="h:8", identity=b"alive")
    place.muster.leave(gone)  # noticed late: the new process keeps its place
    place.come(1)
    told = place.sent()
    assert {identity for identity, _ in told} == {b"alive", b"1a"}
    assert told[0][1]["store"] == "h:8"


def test_one_that_has_left_is_waited_for_again(place):
    place.muster.leave(place.come(0, store="h:7"))
    place.come(1)
    assert place.sent() == []


def refusal(place):
    ((_, header),) = place.sent()
    assert (header["type"], header["code"]) == ("refused", "hello")
    return header["reason"]


def test_two_hosts_with_one_number_are_told_apart_once_the_first_is_heard_again(place, capsys):
    first = place.come(1, host="b/boot/5", now=1.0)
    place.come(1, host="c/boot/6", now=2.0)
    place.muster.tick()
    assert place.sent() == []
    first.heard = 4.0
    place.muster.tick()
    assert refusal(place) == "rank 1 is here already, from b: give each learner host its own --node-rank"
    assert "refused 'rank1'" in capsys.readouterr().out
    place.come(0, store="h:7")
    assert {identity for identity, _ in place.sent()} == {b"0a", b"1b/boot/5"}
    place.muster.tick()
    assert place.sent() == []


def test_a_host_that_was_started_anew_takes_the_place_of_its_dead_process(place):
    first = place.come(1, host="container-1", now=1.0)
    place.come(1, host="container-2", now=2.0)
    first.gone = "silent"
    place.muster.leave(first)
    place.muster.tick()
    place.come(0, store="h:7", now=20.0)
    assert {identity for identity, _ in place.sent()} == {b"0a", b"1container-2"}


def test_groups_of_different_sizes_do_not_meet(place):
    place.come(0, world=2, store="h:7")
    place.come(1, world=4, host="b")
    assert "belongs to a group of 4, those that wait to one of 2" in refusal(place)


def test_other_settings_are_named_with_both_values(place):
    place.come(1, settings={"learner.lr": "0.2", "steps": "5"})
    assert refusal(place).startswith("learner.lr is 0.2 here and 0.1 on the first host: start all learner hosts")
    place.come(1, settings={"steps": "5", "new": "1"})
    assert refusal(place).startswith(
        "learner.lr is absent here and 0.1 on the first host; new is 1 here and absent on the first host: "
    )


@pytest.mark.parametrize("header", [{}, {"store": 3, "settings": {}}, {"store": "h:1", "settings": [1]}])
def test_a_malformed_message_is_a_counted_fault(place, header):
    session = place.come(0, store="h:1")
    with pytest.raises(WireError):
        place.muster.come(session, {"type": "muster", **header}, 0.0)


def test_who_is_missing_is_said_after_some_seconds(place):
    place.come(2, world=12, now=10.0)
    assert place.muster.notices(10.0 + NOTICE_S - 0.1) == []
    assert place.muster.notices(10.0 + NOTICE_S) == [
        "1 of 12 learner ranks are here; missing: 0, 1, 3, 4, 5, 6, 7, 8, ..."
    ]
