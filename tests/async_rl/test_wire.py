from __future__ import annotations

from dataclasses import replace

import msgpack
import numpy as np
import pytest
from buffer_helpers import make
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.data import Annotation
from async_rl.errors import WireError
from async_rl.wire import (
    JOINT_BELOW,
    Limits,
    decode_annotations,
    decode_groups,
    encode_annotations,
    encode_groups,
    pack_header,
    unpack_header,
)
from async_rl.wire.joint import JOINT_MOST


def roundtrip(groups):
    frames = encode_groups("submit", groups, seq=3)
    received = [bytes(f) for f in frames]
    header = unpack_header(received[0])
    return header, received[1:]


def test_groups_come_back_as_they_were_and_read_only():
    groups = [make(3, 1, meta={"actor": "a", "seconds": 0.5}), make(4, versions=(1, 2, 2), rewards=(0.5, 1, 0))]
    header, frames = roundtrip(groups)
    assert (header["type"], header["seq"]) == ("submit", 3)
    for one, other in zip(groups, decode_groups(header, frames), strict=True):
        assert (one.ordinal, one.attempt, one.task_index) == (other.ordinal, other.attempt, other.task_index)
        assert one.lengths == other.lengths
        assert one.meta == other.meta
        np.testing.assert_array_equal(one.rewards, other.rewards)
        for name, array in one.arrays.items():
            np.testing.assert_array_equal(array, other.arrays[name])
            assert array.dtype == other.arrays[name].dtype
            assert not other.arrays[name].flags.writeable


def test_bytes_of_large_arrays_are_not_copied_on_the_way_and_small_ones_share_a_frame():
    length = JOINT_BELOW // 4  # tokens, logprobs and versions are of JOINT_BELOW bytes, the mask is smaller
    group = make(0, versions=[0] * (length - 2), rewards=(1.0,))
    head, joint, tokens, logprobs, versions = encode_groups("submit", [group])
    assert len(joint) == length + 8  # the mask, and a reward of 4 bytes that is filled up to 8
    frames = [joint, tokens, logprobs, versions]
    (decoded,) = decode_groups(unpack_header(head), frames)
    for name in ("tokens", "logprobs", "versions"):
        assert np.shares_memory(decoded.arrays[name], group.arrays[name])
    assert np.shares_memory(decoded.arrays["loss_mask"], np.frombuffer(joint, np.uint8))
    np.testing.assert_array_equal(decoded.arrays["loss_mask"], group.arrays["loss_mask"])
    assert decoded.rewards.tolist() == [1.0]
    # as it came it goes on: nothing is laid out again
    again = encode_groups("shard", [decoded], with_meta=False)
    assert all(one is other for one, other in zip(again[1:], frames, strict=True))
    # but not what was changed
    changed = replace(decoded, rewards=np.float32([2.0]))
    head, *frames = encode_groups("x", [changed])
    (back,) = decode_groups(unpack_header(head), frames)
    assert back.rewards.tolist() == [2.0]


def test_small_arrays_of_several_groups_share_a_frame_and_each_group_keeps_only_its_own():
    groups = [make(i) for i in range(3)]
    alone = [bytes(encode_groups("submit", [group])[1]) for group in groups]
    head, *frames = encode_groups("shard", groups)
    assert [bytes(frame) for frame in frames] == [b"".join(alone)]
    decoded = decode_groups(unpack_header(head), frames)
    assert [bytes(encode_groups("submit", [group])[1]) for group in decoded] == alone
    assert not np.shares_memory(decoded[0].arrays["tokens"], np.frombuffer(frames[0], np.uint8))
    assert [bytes(frame) for frame in encode_groups("shard", decoded)[1:]] == [b"".join(alone)]


def test_a_joint_frame_ends_where_the_next_group_would_make_it_too_long():
    length = JOINT_BELOW - 8  # one small array, the mask, and three large ones; 16 bytes of rewards
    groups = [make(i, versions=[i] * (length - 2), rewards=(float(i),)) for i in range(70)]
    part = length + 8
    first = JOINT_MOST // part  # groups in the first frame
    head, *frames = encode_groups("shard", groups)
    assert len(frames) == 2 + 3 * len(groups)
    assert len(frames[0]) == first * part
    assert len(frames[1 + 3 * first]) == (len(groups) - first) * part
    header = unpack_header(head)
    for one, other in zip(groups, decode_groups(header, frames), strict=True):
        assert one.rewards.tolist() == other.rewards.tolist()
        assert all(np.array_equal(one.arrays[name], other.arrays[name]) for name in one.arrays)
    for wrong in (
        [*frames[: 1 + 3 * first], frames[1 + 3 * first][:-8], *frames[2 + 3 * first :]],
        [frames[0] + bytes(8), *frames[1:]],
        [frames[0][:-8], *frames[1:]],
        frames[1:],
        frames[:-1],
    ):
        with pytest.raises(WireError, match=r"bad_shape|frame_count"):
            decode_groups(header, wrong)


def test_small_arrays_that_do_not_fill_their_frame_are_refused():
    header, frames = roundtrip([make(0)])
    for wrong in (frames[0][:-8], frames[0] + bytes(8)):
        with pytest.raises(WireError, match="bad_shape"):
            decode_groups(header, [wrong])


def test_a_large_array_that_does_not_fill_its_frame_is_refused():
    head, joint, *large = encode_groups("submit", [make(0, versions=[0] * JOINT_BELOW)])
    with pytest.raises(WireError, match="bad_shape"):
        decode_groups(unpack_header(head), [joint, large[0], large[1][4:], *large[2:]])


@pytest.mark.parametrize("copies", [1, 3])
def test_groups_of_all_shapes_of_frames_come_back(copies):
    """Without small arrays but the rewards, with empty arrays, with several groups: each finds its own frames."""
    arrays = {
        "versions": np.arange(8, dtype=np.int32).reshape(4, 2),
        "episode_none": np.empty((0, 3), np.float64),
        "large": np.arange(4 * JOINT_BELOW, dtype=np.float32).reshape(4, -1),
    }
    sent = []
    for i in range(copies):
        group = make(i, rewards=(0.5,))
        object.__setattr__(group, "lengths", (4,))
        object.__setattr__(group, "arrays", {name: array + i for name, array in arrays.items()})
        sent.append(group)
    header, frames = roundtrip(sent)
    for one, other in zip(sent, decode_groups(header, frames), strict=True):
        assert one.arrays.keys() == other.arrays.keys()
        for name, array in one.arrays.items():
            np.testing.assert_array_equal(array, other.arrays[name])
            assert other.arrays[name].shape == array.shape


def test_control_arrays_with_more_axes_pass_too():
    group = make(0)
    arrays = {"observations": np.ones((6, 4, 3), np.float32), "versions": np.zeros((6, 4), np.int32)}
    object.__setattr__(group, "arrays", arrays)
    header, frames = roundtrip([group])
    assert decode_groups(header, frames)[0].arrays["observations"].shape == (6, 4, 3)


def break_header(path, value):
    """A message in which one place is another; beyond ``arrays`` a path leads into the packed description."""
    header, frames = roundtrip([make(0)])
    entry = header["groups"][0]
    entry["arrays"] = msgpack.unpackb(entry["arrays"])
    node = header
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    if "arrays" in path[:-1] or "arrays" not in path:
        entry["arrays"] = pack_header(entry["arrays"])
    return header, frames


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("schema",), 1, "schema_mismatch"),
        (("groups",), {}, "bad_header"),
        (("groups", 0), 5, "bad_header"),
        (("groups", 0, "ordinal"), -1, "bad_header"),
        (("groups", 0, "attempt"), True, "bad_header"),
        (("groups", 0, "task_index"), 1 << 62, "bad_header"),
        (("groups", 0, "meta"), [], "bad_header"),
        (("groups", 0, "arrays"), 3, "bad_header"),
        (("groups", 0, "arrays"), [], "bad_header"),
        (("groups", 0, "arrays"), b"", "bad_header"),
        (("groups", 0, "arrays"), b"\x91" * 5000, "bad_header"),
        (("groups", 0, "arrays"), bytes(1 << 17), "bad_header"),
        (("groups", 0, "arrays"), pack_header({"tokens": 1}), "bad_header"),
        (("groups", 0, "arrays"), pack_header([]), "missing_array"),
        (("groups", 0, "arrays", 0), "tokens", "bad_header"),
        (("groups", 0, "arrays", 1, 0), "tokens", "bad_header"),
        (("groups", 0, "lengths"), [], "bad_lengths"),
        (("groups", 0, "lengths"), [3, 0], "bad_lengths"),
        (("groups", 0, "lengths"), [3, 4], "bad_shape"),
        (("groups", 0, "lengths"), [6], "missing_array"),
        (("groups", 0, "arrays", 0, 1), "object", "bad_dtype"),
        (("groups", 0, "arrays", 0, 1), "float32", "bad_dtype"),
        (("groups", 0, "arrays", 0, 2), [7], "bad_shape"),
        (("groups", 0, "arrays", 0, 2), [-6], "bad_shape"),
        (("groups", 0, "arrays", 0, 2), [6], "bad_shape"),
        (("groups", 0, "arrays", 0, 2), [], "bad_shape"),
        (("groups", 0, "arrays", 0, 2), [None, None], "bad_shape"),
        (("groups", 0, "arrays", 0, 2), [None] + 8 * [1], "bad_shape"),
        (("groups", 0, "arrays", 0, 2), [None, 1], "bad_dtype"),
        (("groups", 0, "arrays", 4, 2), [2, 1], "missing_array"),
        (("groups", 0, "arrays", 4, 2), [1 << 33], "bad_shape"),
        (("groups", 0, "arrays", 4, 1), "int32", "missing_array"),
        (("groups", 0, "arrays", 1, 0), "other", "missing_array"),
        (("groups", 0, "arrays", 3, 0), "other", "missing_array"),
        (("groups", 0, "arrays", 4, 0), "other", "missing_array"),
    ],
)
def test_each_fault_of_a_message_has_its_own_reason(path, value, reason):
    header, frames = break_header(path, value)
    with pytest.raises(WireError) as refused:
        decode_groups(header, frames)
    assert refused.value.reason == reason


def test_frames_and_arrays_must_match_in_number():
    header, frames = roundtrip([make(0)])
    for wrong in (frames[:-1], [*frames, b""]):
        with pytest.raises(WireError, match="frame_count"):
            decode_groups(header, wrong)


def test_limits_are_kept():
    header, frames = roundtrip([make(0), make(1)])
    for limits, reason in [
        (Limits(groups=1), "too_many_groups"),
        (Limits(arrays=2), "too_many_arrays"),
        (Limits(containers=3), "too_many_arrays"),
        (Limits(frame_bytes=8), "frame_too_large"),
        (Limits(trajectories=1), "bad_lengths"),
    ]:
        with pytest.raises(WireError, match=reason):
            decode_groups(header, frames, limits)
    with pytest.raises(WireError, match="header_too_large"):
        unpack_header(b"x" * 10, Limits(header_bytes=9))


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "bad_msgpack"),
        (b"\xc1", "bad_msgpack"),
        (pack_header({"type": "x"}) + b"more", "bad_msgpack"),
        (msgpack.packb({"type": b"\xff\xfe"}, use_bin_type=False), "bad_msgpack"),
        (msgpack.packb([1, 2]), "bad_header"),
        (msgpack.packb({"type": 1}), "bad_header"),
        (msgpack.packb({1: 2, "type": "x"}), "bad_msgpack"),
        (b"\x91" * 5000, "bad_msgpack"),
    ],
)
def test_a_header_that_is_none_is_refused(frame, reason):
    with pytest.raises(WireError, match=reason):
        unpack_header(frame)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
def test_any_bytes_are_decoded_or_refused_and_nothing_else_happens(frames):
    try:
        decode_groups(unpack_header(frames[0]), frames[1:])
    except WireError:
        return


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 63) | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.sampled_from(["ordinal", "attempt", "task_index", "lengths", "arrays", "meta"]) | st.integers(0, 4),
    PLAIN,
    st.integers(0, 2),
)
def test_any_value_in_any_place_of_a_header_is_decoded_or_refused(place, value, part):
    header, frames = roundtrip([make(0)])
    header = unpack_header(pack_header(header))
    entry = header["groups"][0]
    if isinstance(place, int):
        specs = msgpack.unpackb(entry["arrays"])
        specs[place][part] = value
        entry["arrays"] = pack_header(specs)
    else:
        entry[place] = value
    try:
        decode_groups(unpack_header(pack_header(header)), frames)
    except WireError:
        return


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1k"])
def test_a_header_that_would_overflow_the_stack_of_its_reader_is_refused(nested):
    for depth in (31, 32, 500, 1000):
        frame = b"\x82\xa4type\xa4beat\xa4deep" + nested * depth + b"\x01"
        if depth < 32:
            assert unpack_header(frame)["type"] == "beat"
        else:
            with pytest.raises(WireError, match=r"too_deep|bad_msgpack"):
                unpack_header(frame)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("last_obs/x", [0, 1 << 39, 1 << 39]), ("hidden/x", [1 << 39, 0, 1 << 39]), ("x", [None, 0, 1 << 39])],
)
def test_an_empty_array_of_impossible_shape_is_refused(name, shape):
    header, frames = roundtrip([make(0)])
    entry = header["groups"][0]
    entry["arrays"] = pack_header([*msgpack.unpackb(entry["arrays"]), [name, "float64", shape]])
    with pytest.raises(WireError, match="bad_shape"):
        decode_groups(header, frames)


def test_a_description_that_is_known_is_as_exact_as_one_that_is_new():
    """The same bytes with another sum of lengths, other frames or narrower limits: each is looked at anew."""
    header, frames = roundtrip([make(0)])
    decode_groups(header, frames)
    decode_groups(header, frames)
    with pytest.raises(WireError, match="bad_shape"):
        decode_groups(header, [frames[0] + bytes(8)])
    with pytest.raises(WireError, match="too_many_arrays"):
        decode_groups(header, frames, Limits(arrays=4))
    header["groups"][0]["lengths"] = [3, 30]
    with pytest.raises(WireError, match="bad_shape"):
        decode_groups(header, frames)


def test_arrays_in_memory_that_others_may_write_are_read_only_all_the_same():
    head, *frames = encode_groups("submit", [make(0, versions=[0] * JOINT_BELOW)])
    (group,) = decode_groups(unpack_header(head), [memoryview(bytearray(frame)) for frame in frames])
    assert not any(array.flags.writeable for array in (*group.arrays.values(), group.rewards))


# ---------------------------------------------------------------- annotations


def annotations_sent():
    sent = [
        Annotation(ordinal=3, attempt=1, stage="reward", values=np.float32([0.5, np.nan])),
        Annotation(ordinal=4, attempt=0, stage="reference", values=np.float32([-1, -2, -3])),
    ]
    frames = [bytes(f) for f in encode_annotations("annotate", sent, seq=7)]
    return sent, unpack_header(frames[0]), frames[1:]


def test_annotations_come_back_as_they_were_and_read_only():
    sent, header, frames = annotations_sent()
    assert (header["type"], header["seq"]) == ("annotate", 7)
    for one, other in zip(sent, decode_annotations(header, frames), strict=True):
        assert (one.ordinal, one.attempt, one.stage) == (other.ordinal, other.attempt, other.stage)
        np.testing.assert_array_equal(one.values, other.values)
        assert not other.values.flags.writeable


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("ordinal", -1, "bad_header"),
        ("attempt", 1.5, "bad_header"),
        ("values", -1, "bad_header"),
        ("values", [2], "bad_header"),
        ("values", 3, "bad_shape"),
        ("stage", 7, "bad_header"),
        ("stage", "s" * 201, "bad_header"),
    ],
)
def test_a_malformed_annotation_is_refused_with_a_reason(key, value, reason):
    _, header, frames = annotations_sent()
    header["groups"][0][key] = value
    with pytest.raises(WireError) as refused:
        decode_annotations(header, frames)
    assert refused.value.reason == reason


def test_annotations_must_match_their_frames_schema_and_limits():
    _, header, frames = annotations_sent()
    for change, received, limits, reason in (
        ({}, frames[:1], Limits(), "frame_count"),
        ({"schema": 1}, frames, Limits(), "schema_mismatch"),
        ({"groups": 3}, frames, Limits(), "bad_header"),
        ({"groups": [3, 4]}, frames, Limits(), "bad_header"),
        ({}, frames, Limits(groups=1), "too_many_groups"),
        ({}, frames, Limits(frame_bytes=4), "frame_too_large"),
    ):
        with pytest.raises(WireError) as refused:
            decode_annotations({**header, **change}, received, limits)
        assert refused.value.reason == reason
