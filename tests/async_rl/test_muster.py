"""Ranks of several hosts find each other at the server, life after life; who cannot take part is told why."""

import pytest

from async_rl.buffer.muster import NOTICE_S, Muster
from async_rl.buffer.post import Post
from async_rl.buffer.roster import Roster, Session
from async_rl.errors import WireError
from async_rl.wire import unpack_header

SETTINGS = {"learner.lr": "0.1", "steps": "5"}


class Place:
    """A muster and what it sends, by identity."""

    def __init__(self):
        self.post = Post()
        self.roster = Roster()
        self.muster = Muster(self.post, self.roster, SETTINGS)

    def session(self, rank, world=2, host="a", identity=None, role="recruit", pid=1, now=0.0):
        return Session(
            identity=identity or f"{rank}{host}".encode(),
            name=f"rank{rank}",
            role=role,
            rank=rank,
            world=world,
            pid=pid,
            host=host,
            heard=now,
            seq=1,
        )

    def come(self, rank, store="", settings=None, group="2 hosts", now=0.0, **who):
        session = self.session(rank, now=now, **who)
        settings = SETTINGS if settings is None else settings
        header = {"type": "muster", "store": store, "settings": settings, "group": group}
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


def test_the_same_process_may_say_twice_that_it_is_there(place):
    place.come(0, store="h:7", identity=b"before the break")
    place.come(0, store="h:7", identity=b"after it")
    place.come(1)
    assert {identity for identity, _ in place.sent()} == {b"after it", b"1a"}


def test_a_rank_whose_process_died_while_it_waited_is_replaced_once_that_is_known(place):
    gone = place.come(0, store="h:7", identity=b"dead", pid=1)
    place.come(0, store="h:8", identity=b"alive", pid=2)
    place.come(1)
    assert [h["store"] for _, h in place.sent()] == ["h:7"] * 2, "until then it may live"
    gone = place.come(0, store="h:7", identity=b"dead", pid=1)
    place.come(0, store="h:8", identity=b"alive", pid=2)
    gone.gone = "silent"
    place.muster.leave(gone)
    place.muster.tick()
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


def beats(place, session, times):
    """The server hears of a process, and looks."""
    for _ in range(times):
        session.seq += 1
        place.muster.tick()
        place.muster.tick()


def test_two_hosts_with_one_number_are_told_apart_once_the_first_is_heard_again(place, capsys):
    first = place.come(1, host="b/boot/5")
    place.come(1, host="c/boot/6")
    place.muster.tick()
    assert place.sent() == []
    beats(place, first, 1)
    assert place.sent() == [], "what it sent before its death may come late"
    beats(place, first, 1)
    assert refusal(place) == "rank 1 is here already, from b: give each learner host its own --node-rank"
    assert "refused 'rank1'" in capsys.readouterr().out
    place.come(0, store="h:7")
    assert {identity for identity, _ in place.sent()} == {b"0a", b"1b/boot/5"}
    place.muster.tick()
    assert place.sent() == []


def test_a_rank_that_is_at_work_on_another_host_keeps_its_number(place):
    at_work = place.session(1, host="b/boot/5", identity=b"w", role="learner")
    place.roster.join(at_work)
    place.come(1, host="c/boot/6")
    beats(place, at_work, 2)
    assert refusal(place).startswith("rank 1 is here already, from b")
    place.come(1, host="c/boot/6")
    place.roster.leave(at_work, "silent")
    place.muster.tick()
    place.come(0, store="h:7")
    assert {identity for identity, _ in place.sent()} == {b"0a", b"1c/boot/6"}


def test_a_server_that_slept_does_not_take_a_dead_process_for_alive(place):
    first = place.come(1, host="container-1")
    place.roster.join(first)
    place.come(1, host="container-2")
    place.roster.excuse(50.0)  # nobody could be heard: silence counts from now
    for _ in range(5):
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


@pytest.mark.parametrize(
    ("other", "is_named"),
    [
        ({"world": 4}, "a group of 4 ranks (2 hosts), those that wait to one of 2 ranks (2 hosts)"),
        ({"group": "3 hosts"}, "a group of 2 ranks (3 hosts), those that wait to one of 2 ranks (2 hosts)"),
    ],
)
def test_ranks_of_different_groups_do_not_meet(place, other, is_named):
    place.come(0, store="h:7")
    place.come(1, host="b", **other)
    why = refusal(place)
    assert is_named in why
    assert why.endswith("the same --nnodes, learner.ranks, kind of device and version of torch")


def test_other_settings_are_named_with_both_values(place):
    place.come(1, settings={"learner.lr": "0.2", "steps": "5"})
    assert refusal(place).startswith("learner.lr is 0.2 here and 0.1 on the first host: start all learner hosts")
    place.come(1, settings={"steps": "5", "new": "1"})
    assert refusal(place).startswith(
        "learner.lr is absent here and 0.1 on the first host; new is 1 here and absent on the first host: "
    )


@pytest.mark.parametrize("header", [{}, {"store": 3}, {"settings": [1]}, {"group": 2}])
def test_a_malformed_message_is_a_counted_fault(place, header):
    session = place.come(0, store="h:1")
    with pytest.raises(WireError):
        place.muster.come(session, {"store": "h:1", "settings": SETTINGS, **header} if header else {}, 0.0)


def test_who_is_missing_is_said_after_some_seconds(place):
    place.come(2, world=12, now=10.0)
    assert place.muster.notices(10.0 + NOTICE_S - 0.1) == []
    assert place.muster.notices(10.0 + NOTICE_S) == [
        "1 of 12 learner ranks are here; missing: 0, 1, 3, 4, 5, 6, 7, 8, ..."
    ]


def test_a_missing_rank_is_named_with_the_host_on_which_it_was(place):
    assert place.muster.missing() == ""
    place.come(1, host="b/boot/5")
    place.come(0, store="h:7")
    place.come(0, store="h:8")
    assert place.muster.missing() == "1 of 2 learner ranks are here; missing: 1 (was on b)"
