"""Slot-seconds by hand, on a clock that the test moves."""

from actors.occupancy import Occupancy


def test_slots_in_use_are_added_up_and_what_waits_for_a_slot_does_not_count():
    now = [10.0]
    occupancy = Occupancy(4, lambda: now[0])
    assert occupancy.read() == {"slots": 4, "slot_s": 0.0, "clock_s": 10.0}
    occupancy.note(3)
    now[0] = 12.0  # 3 slots for 2 s
    assert occupancy.read()["slot_s"] == 6.0
    occupancy.note(9)
    now[0] = 13.0  # 4 slots for 1 s, five samples wait
    occupancy.note(0)
    now[0] = 100.0
    assert occupancy.read() == {"slots": 4, "slot_s": 10.0, "clock_s": 100.0}
