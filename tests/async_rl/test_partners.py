"""When the host of a rank has vanished, ranks elsewhere are told before their collective gives up, and no sooner."""

import pytest

from async_rl.buffer.partners import Partners
from async_rl.buffer.roster import Roster, Session

PERIOD_S = 10.0
LATE_S = 60.0
"""Six periods: the README's word for how long a frozen process is waited for."""


class Group:
    """Ranks of one life, and a clock that turns as the server's does."""

    def __init__(self, hosts):
        self.roster, self.now = Roster(), 0.0
        self.partners = Partners(self.roster, PERIOD_S)
        for rank, host in enumerate(hosts):
            self.join(rank, host)

    def join(self, rank, host, group="g"):
        self.roster.join(
            Session(
                identity=f"{group}{rank}{host}".encode(),
                name=f"learner{rank}",
                role="learner",
                rank=rank,
                world=3,
                pid=rank,
                host=host,
                heard=self.now,
                seq=1,
                group=group,
            )
        )

    def lose(self, rank, why="silent"):
        self.roster.leave(self.roster.named(f"learner{rank}"), why)

    def turn(self, seconds, group="g", turn_s=PERIOD_S / 6):
        """Who is told in this time, by rank."""
        told, end = {}, self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + turn_s)
            told |= {session.rank: why for session, why in self.partners.forsaken(group, self.now)}
        return told


@pytest.fixture
def group():
    made = Group(("a", "a", "b/boot/5"))
    made.turn(1.0)
    return made


def test_the_others_are_told_who_is_gone_once_it_has_been_silent_for_six_periods(group):
    group.lose(2)  # the roster lets go of it after one period
    assert group.turn(LATE_S - PERIOD_S - 1) == {}
    told = group.turn(3.0)
    assert told.keys() == {0, 1}
    assert told[0] == "rank 2 on b has not been heard of for 60 s: begin again"
    assert group.turn(LATE_S) == {}, "once"


def test_one_that_comes_back_in_time_is_waited_for_and_its_next_silence_counts_anew(group):
    group.lose(2)
    assert group.turn(45.0) == {}
    group.join(2, "b/boot/5")
    group.turn(5.0)
    group.lose(2)
    assert group.turn(45.0) == {}
    assert group.turn(10.0).keys() == {0, 1}


def test_ranks_on_the_host_of_the_lost_one_are_left_to_that_host(group):
    group.lose(1)
    assert group.turn(LATE_S).keys() == {2}


def test_one_that_said_goodbye_is_not_missed(group):
    group.lose(2, "bye")
    assert group.turn(2 * LATE_S) == {}


def test_the_server_s_own_sleep_is_not_counted_as_silence(group):
    group.lose(2)
    for _ in range(9):  # 40 s as the server has seen them, 9 hours on the clock
        group.now += 3600.0
        assert group.partners.forsaken("g", group.now) == []
    assert group.turn(12.0).keys() == {0, 1}


def test_another_life_of_the_group_begins_with_nobody_missing(group):
    group.lose(2)
    group.turn(45.0)
    for rank in (0, 1):
        group.lose(rank, "replaced")
        group.join(rank, "a", group="h")
    assert group.turn(2 * LATE_S, group="h") == {}


def test_a_group_on_one_host_is_never_told():
    group = Group(("a", "a", "a"))
    group.turn(1.0)
    group.lose(1)
    assert group.turn(3 * LATE_S) == {}


def test_of_one_that_is_known_to_be_dead_the_others_are_told_at_once(group):
    group.lose(0, "dead")
    assert group.turn(2.0) == {2: "rank 0 on a has died: begin again"}
