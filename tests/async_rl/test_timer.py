from __future__ import annotations

from async_rl.timer import STATES, WORK, StateTimer, utilization


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def timer():
    clock = Clock()
    return clock, StateTimer(clock=clock, wall=lambda: clock() + 1000.0)


def test_seconds_add_up_to_the_wall_clock_whatever_happens():
    clock, t = timer()
    for state, seconds in [("generating", 1.0), ("paused", 2.0), ("generating", 4.0), ("waiting_ticket", 8.0)]:
        t.enter(state)
        clock.now += seconds
    drained = t.drain()
    assert drained["state"] == "waiting_ticket"
    assert drained["seconds"] == {"starting": 0.0, "generating": 5.0, "paused": 2.0, "waiting_ticket": 8.0}


def test_spans_lie_on_the_wall_clock_and_are_given_once():
    clock, t = timer()
    clock.now += 3.0
    t.enter("generating")
    clock.now += 2.0
    assert t.drain()["spans"] == [("starting", 1100.0, 1103.0), ("generating", 1103.0, 1105.0)]
    clock.now += 1.0
    assert t.drain()["spans"] == [("generating", 1105.0, 1106.0)]
    assert t.drain()["spans"] == []


def test_a_block_returns_to_the_state_before_even_after_an_error():
    clock, t = timer()
    t.enter("training")
    try:
        with t.during("publishing"):
            assert t.state == "publishing"
            clock.now += 1.0
            raise KeyError
    except KeyError:
        pass
    assert t.state == "training"
    assert t.drain()["seconds"]["publishing"] == 1.0


def test_utilization_is_the_share_of_own_work_without_the_start():
    assert utilization({"starting": 100.0, "generating": 3.0, "idle": 1.0}) == 0.75
    assert utilization({"starting": 100.0}) == 0.0
    assert set(STATES) > WORK
