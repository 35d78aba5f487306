"""When free slots are filled again: not one prompt at a time, never later than what a wave of short answers takes."""

import numpy as np
import pytest

from actors.engines.base import Request
from actors.engines.slots import Slots

STOP = 1
SLOTS = 128


def make(requests, slots=SLOTS):
    """Slots with so many queued requests of one sample each."""
    made = Slots(slots, (STOP,))
    for i in range(requests):
        made.submit(Request(id=i, prompt=(5,), num_samples=1, seed=(i,), max_new_tokens=50, temperature=0.0))
    return made


def step(slots, ending):
    """One decode step in which the first ``ending`` samples end; how many prompts were admitted before it."""
    admitted = len(slots.admit(len(slots.active)))
    tokens = np.full(len(slots.active), 9, np.int32)
    tokens[:ending] = STOP
    _, going = slots.record(tokens, np.zeros(len(tokens), np.float32), 0)
    slots.move(np.arange(going.sum()))
    return admitted


@pytest.mark.parametrize(
    ("requests", "endings", "admitted"),
    [
        (300, [0, 0, 0, 8, 0, 0, 0, 0, 0], [128, 0, 0, 0, 0, 0, 0, 8, 0]),  # four steps after a slot was free
        (300, [1, 0, 0, 0, 0, 0, 1, 0, 0], [128, 0, 0, 0, 0, 0, 0, 2, 0]),  # one free slot of 128 is too little
        (129, [1, 0, 0, 0, 0, 0, 0, 0, 0], [128, 0, 0, 0, 1, 0, 0, 0, 0]),  # but enough for all that is queued
        (300, [128, 0, 0, 0, 5, 0, 0, 0, 0], [128, 128, 0, 0, 0, 0, 0, 0, 5]),  # nothing runs: at once
    ],
)
def test_free_slots_are_filled_together(requests, endings, admitted):
    slots = make(requests)
    assert [step(slots, ending) for ending in endings] == admitted


def test_what_comes_late_waits_no_longer_than_the_rest():
    slots = make(100)
    assert step(slots, 0) == 100  # 28 slots are free and nothing is queued
    for _ in range(10):
        assert step(slots, 0) == 0
    slots.submit(Request(id=500, prompt=(5,), num_samples=1, seed=(1,), max_new_tokens=50, temperature=0.0))
    assert [step(slots, 0) for _ in range(5)] == [0, 0, 0, 1, 0]
