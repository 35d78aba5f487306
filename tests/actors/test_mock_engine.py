"""The engine without a model, on a virtual clock; its alarm on the real one."""

import math
import select
import time

import numpy as np
import pytest

from actors.engines.base import Request
from actors.engines.mock import MockEngine
from async_rl.errors import AsyncRLError, WeightsError
from async_rl.lengths import Lengths
from async_rl.weights.manifest import Manifest, chunk_checksums, combine


class Clock:
    """A clock that only waiting advances."""

    def __init__(self):
        self.now = 100.0
        self.waits = []

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


def manifest(version, data=b"weights!"):
    chunks = chunk_checksums(memoryview(data), 4)
    return Manifest(
        version=version,
        run_id="r",
        tensors=(),
        nbytes=len(data),
        chunk_bytes=4,
        chunks=chunks,
        checksum=combine(chunks),
        segment="",
        host="",
    )


def request(id=0, num_samples=1, max_new_tokens=64):
    return Request(
        id=id, prompt=(1,), num_samples=num_samples, seed=(7, id), max_new_tokens=max_new_tokens, temperature=1.0
    )


def engine(clock, **changes):
    settings = {"lengths": Lengths(kind="constant", median=8), "tokens_per_s": 4.0, "slots": 4}
    made = MockEngine(
        vocab=32,
        stop_token_ids=(2, 3),
        clock=lambda: clock.now,
        wait=clock.wait,
        **(settings | changes),
    )
    made.load_weights(manifest(0), memoryview(b"weights!"))
    return made


def drain(made):
    completions = []
    while made.num_running:
        completions += made.step(10.0)
    return completions


def small(**changes):
    settings = {"lengths": Lengths(kind="constant", median=4), "tokens_per_s": 1e6, "vocab": 8, "slots": 1}
    return MockEngine(**(settings | {"stop_token_ids": (2,)} | changes))


def test_a_sample_takes_its_tokens_time_and_step_waits_no_longer_than_it_may():
    clock = Clock()
    made = engine(clock)
    made.submit([request()])
    assert made.step(0.5) == []
    assert made.step(0.0) == []
    assert clock.waits == [0.5]
    (completion,) = made.step(60.0)
    assert clock.now == 102.0
    assert (completion.request_id, completion.sample, made.num_running) == (0, 0, 0)
    assert made.step(60.0) == []
    assert clock.now == 102.0


def test_a_freed_slot_is_refilled_from_the_time_it_was_free():
    clock = Clock()
    made = engine(clock, slots=2)
    made.submit([request(num_samples=6)])  # three rounds of two, 2 s each
    clock.now += 100
    assert len(made.step(0.0)) == 6
    clock = Clock()
    made = engine(clock, slots=2)
    made.submit([request(num_samples=6)])
    assert len(drain(made)) == 6
    assert clock.now == 106.0


def test_a_sample_that_spans_a_swap_carries_both_versions():
    clock = Clock()
    made = engine(clock, lengths=Lengths(kind="constant", median=1000), tokens_per_s=2.0)
    made.submit([request(max_new_tokens=4)])  # cut at 4: tokens at 0.5, 1.0, 1.5, 2.0 s
    clock.now += 1.2
    assert made.load_weights(manifest(5), memoryview(b"weights!")) == manifest(5).checksum
    (completion,) = drain(made)
    assert completion.versions.tolist() == [0, 0, 5, 5]
    assert completion.finish_reason == "length"
    for version in range(6, 40):  # history that nothing needs any more is dropped
        made.load_weights(manifest(version), memoryview(b"weights!"))
    assert made.version == 39
    assert len(made._swaps) <= 2


def test_a_sample_lasts_as_long_as_its_length_at_the_speed_of_a_slot():
    clock = Clock()
    made = engine(clock, lengths=Lengths(kind="lognormal", median=20), slots=500)
    made.submit([request(num_samples=500, max_new_tokens=100)])
    ends = sorted((s.finish_s - 100.0, len(s.tokens)) for s in made._running)
    assert all(seconds == pytest.approx(length / 4.0) for seconds, length in ends)
    completions = drain(made)
    cut = [c for c in completions if len(c.tokens) == 100 and c.finish_reason == "length"]
    assert 0 < len(cut) < 60  # P(X > 100) = P(Z > ln 5 / 0.99) = 5 %
    ended = [c for c in completions if c.finish_reason == "stop"]
    assert len(ended) + len(cut) == 500
    assert all(c.tokens[-1] == 2 and c.logprobs[-1] == 0 for c in ended)  # the length is given: the end is certain
    words = np.concatenate([c.tokens[:-1] for c in ended])
    assert set(np.unique(words)) == set(range(32)) - {2, 3}
    assert ended[-1].logprobs[0] == pytest.approx(-math.log(30))  # one of 30 words


def test_the_seed_decides_tokens_and_lengths():
    runs = []
    for _ in range(2):
        made = engine(Clock(), lengths=Lengths(kind="lognormal", median=8))
        made.submit([request(1, 3), request(2, 3)])
        runs.append(sorted((c.request_id, c.sample, c.tokens.tolist()) for c in drain(made)))
    assert runs[0] == runs[1]
    assert runs[0][0][2] != runs[0][3][2]


def test_aborted_requests_yield_nothing_and_free_their_slots():
    clock = Clock()
    made = engine(clock, slots=2)
    made.submit([request(1, 3), request(2, 2)])
    made.abort([1, 99])
    assert made.num_running == 2
    assert [c.request_id for c in drain(made)] == [2, 2]
    assert clock.now == 102.0
    made.submit([request(1)])


def test_requests_in_flight_and_impossible_numbers_are_refused_together():
    made = engine(Clock())
    made.submit([request(1)])
    with pytest.raises(ValueError, match="request 1 is in flight"):
        made.submit([request(2), request(1)])
    with pytest.raises(ValueError, match="request 3 is in flight"):
        made.submit([request(3), request(3)])
    with pytest.raises(ValueError, match="out of range"):
        made.submit([request(4, num_samples=0)])
    assert made.num_running == 1


def test_weights_are_verified_and_needed():
    clock = Clock()
    made = small(clock=lambda: clock.now)
    assert made.version == -1
    with pytest.raises(WeightsError, match="chunk 1"):
        made.load_weights(manifest(0), memoryview(b"weightS!"))
    made.submit([request()])
    with pytest.raises(WeightsError, match="no proven version"):
        made.step(0.0)


def test_after_sleep_a_version_is_needed_again_and_a_busy_engine_does_not_sleep():
    made = small()
    made.load_weights(manifest(0), memoryview(b"weights!"))
    made.submit([request()])
    with pytest.raises(AsyncRLError, match="1 samples run"):
        made.sleep()
    assert len(made.step(1.0)) == 1
    assert made.proven
    made.sleep()
    made.sleep()
    made.wake()
    assert not made.proven
    made.submit([request()])
    with pytest.raises(WeightsError, match="no proven version"):
        made.step(0.0)
    made.load_weights(manifest(1), memoryview(b"weights!"))
    assert made.step(1.0)[0].versions.tolist()[0] == 1
    made.close()


def test_its_descriptor_is_readable_exactly_while_a_sample_has_ended():
    made = small(tokens_per_s=200.0)
    made.load_weights(manifest(0), memoryview(b"weights!"))

    def readable(timeout_s):
        return bool(select.select([made.fileno()], [], [], timeout_s)[0])

    assert not readable(0)
    made.submit([request(num_samples=2)])
    assert not readable(0)
    assert made.step(0.0) == []
    assert readable(5)
    assert len(made.step(0.0)) == 1
    assert not readable(0)
    began = time.monotonic()
    assert len(made.step(5.0)) == 1
    assert time.monotonic() - began < 1
    assert not readable(0)
    made.close()
    made.close()
