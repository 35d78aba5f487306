"""Differences of two versions: numbers worked by hand, bit-equal round trips, and frames that a stranger made."""

import itertools
import tracemalloc

import numpy as np
import pytest
import zstandard

from async_rl.errors import WeightsError
from async_rl.weights.delta import apply, encode


def halves(*bits):
    """Bytes of bfloat16 numbers, given by their bits."""
    return memoryview(np.array(bits, "<u2").tobytes())


def bfloat16(values):
    """Bytes of float32 values cut to bfloat16."""
    return memoryview((np.asarray(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes())


def applied(base, frame):
    target = bytearray(base)
    apply(memoryview(target), frame)
    return bytes(target)


def planes(frame):
    return zstandard.ZstdDecompressor().decompress(frame[1:])


def packed(data, **options):
    return b"\x02" + zstandard.ZstdCompressor(**options).compress(data)


def told(size, data):
    """A frame of zeros that says a size of its own: RFC 8878, 8 bytes of content size in place of a window."""
    honest = packed(data, write_content_size=False)
    assert honest[5] == 0  # no content size: a byte of window descriptor follows
    return honest[:5] + b"\xe0" + size.to_bytes(8, "little") + honest[7:]


@pytest.mark.parametrize(
    ("old", "new", "folded"),
    [
        (0x3F80, 0x3F80, 0),  # 1.0, unchanged
        (0x3F80, 0x3F81, 2),  # 1.0 to the next number above: +1, folded to 2
        (0x3F80, 0x3F7F, 1),  # and below, where the exponent changes: -1, folded to 1; XOR would be 0x00FF
        (0x3F81, 0x3F80, 1),
        (0x0000, 0x8000, 0xFFFF),  # 0 to -0: -32768, folded to 65535
    ],
)
def test_a_difference_is_the_distance_of_the_bits_folded_to_a_small_number(old, new, folded):
    frame = encode(halves(old), halves(new), 2)
    assert frame[0] == 2
    assert planes(frame) == bytes([folded & 0xFF, folded >> 8])  # the lower plane first
    assert applied(halves(old), frame) == bytes(halves(new))


def test_bytes_of_equal_weight_lie_together():
    frame = encode(halves(0, 0, 0), halves(1, 2, 300), 2)
    assert planes(frame) == bytes([2, 4, 600 & 0xFF, 0, 0, 600 >> 8])


@pytest.mark.parametrize("itemsize", [2, 4])
def test_whatever_the_bits_are_they_come_back(itemsize):
    random = np.random.default_rng(0)
    base, new = (memoryview(random.bytes(itemsize * 70_001)) for _ in range(2))  # NaN, infinities, subnormals
    assert applied(base, encode(base, new, itemsize)) == bytes(new)


def test_differences_of_several_versions_follow_each_other():
    random = np.random.default_rng(1)
    versions = [bfloat16(random.normal(0, 0.02, 1000) + 1e-3 * step) for step in range(4)]
    state = bytes(versions[0])
    for old, new in itertools.pairwise(versions):
        state = applied(state, encode(old, new, 2))
    assert state == bytes(versions[3])


def test_a_small_step_is_a_small_part_of_the_bytes():
    random = np.random.default_rng(2)
    weights = random.normal(0, 0.02, 500_000).astype(np.float32)
    stepped = weights + random.choice([-1e-5, 1e-5], weights.shape).astype(np.float32)  # AdamW at 1e-5: 1 in 2,000
    old, new = bfloat16(weights), bfloat16(stepped)
    assert 0.02 < np.mean(np.frombuffer(old, "<u2") != np.frombuffer(new, "<u2")) < 0.3
    assert len(encode(old, new, 2)) < 0.15 * old.nbytes


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x03" + packed(bytes(8))[1:],
        b"\x02",
        b"\x02garbage",
        packed(bytes(7)),
        packed(bytes(9)),
        packed(bytes(8))[:-1],
        packed(bytes(8)) + b"\0",
        packed(bytes(8)) + packed(bytes(8))[1:],
        packed(bytes(8), write_content_size=False),
        packed(bytes(1 << 24)),  # 16 MiB out of half a KiB
        told(8, bytes(1 << 24)),  # which says that it is 8 bytes
        told(1 << 60, bytes(8)),  # for which there is no memory
    ],
)
def test_what_is_no_difference_of_so_many_bytes_is_refused(frame):
    with pytest.raises(WeightsError, match="delta"):
        apply(memoryview(bytearray(8)), frame)


def test_a_frame_is_unpacked_into_no_more_memory_than_there_is_a_base_for():
    frames = packed(bytes(1 << 26)), told(8, bytes(1 << 26)), told(1 << 60, bytes(8))
    tracemalloc.start()
    try:
        for frame in frames:
            with pytest.raises(WeightsError):
                apply(memoryview(bytearray(8)), frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("old", "new", "itemsize"), [(8, 8, 3), (8, 6, 2), (6, 6, 4)])
def test_sizes_that_do_not_fit_are_an_error_of_the_caller(old, new, itemsize):
    with pytest.raises(ValueError, match="a delta from"):
        encode(memoryview(bytes(old)), memoryview(bytes(new)), itemsize)
