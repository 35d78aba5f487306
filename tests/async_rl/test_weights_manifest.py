"""Manifests: what they prove, and that nothing off the wire can do more harm than a WeightsError."""

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import WeightsError
from async_rl.weights.manifest import Manifest, Tensor, chunk_checksums, combine, copy_checksum

DATA = bytes(range(24)) * 2  # 48 bytes: float32 [2, 3] and bfloat16 [12]
CHUNK = 20  # chunks of 20, 20 and 8 bytes


def make() -> Manifest:
    chunks = chunk_checksums(memoryview(DATA), CHUNK)
    return Manifest(
        version=3,
        run_id="r",
        tensors=(Tensor("a", "float32", (2, 3), 0), Tensor("b", "bfloat16", (12,), 24)),
        nbytes=48,
        chunk_bytes=CHUNK,
        chunks=chunks,
        checksum=combine(chunks),
        segment="/dev/shm/async_rl-r-1",
        host="h",
    )


def test_a_manifest_survives_the_wire():
    assert Manifest.from_wire(make().to_wire()) == make()


def test_the_last_chunk_is_the_short_one():
    assert [len(make().chunk(memoryview(DATA), i)) for i in range(3)] == [20, 20, 8]


@pytest.mark.parametrize(("byte", "chunk"), [(0, 0), (19, 0), (20, 1), (47, 2)])
def test_a_flipped_bit_is_found_in_its_chunk(byte: int, chunk: int):
    corrupted = bytearray(DATA)
    corrupted[byte] ^= 1
    with pytest.raises(WeightsError, match=f"chunk {chunk} "):
        make().verify(memoryview(corrupted))
    make().verify(memoryview(DATA))


def test_missing_bytes_are_refused():
    with pytest.raises(WeightsError, match="47 bytes, the manifest says 48"):
        make().verify(memoryview(DATA)[:47])


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 47},  # the tensors no longer fit
        {"nbytes": 61},  # three chunks of 20 cover at most 60
        {"nbytes": 10**400},  # too large for a float
        {"chunk_bytes": 0},
        {"version": -1},
        {"version": float("inf")},
        {"checksum": "0" * 32},
        {"chunks": b"1234567"},
        {"tensors": [["a", "int8", [2], 0]]},
        {"tensors": [["a", "float32", [-1], 0]]},
        {"tensors": [["a", "float32", [2], -4]]},
        {"tensors": [["a", "float32", [13], 0]]},
        {"tensors": [["a", "float32", [1] * 1000, 0]]},
        {"tensors": [["a", "float32"]]},
        {"tensors": None},
    ],
)
def test_an_inconsistent_manifest_is_refused(change: dict[str, Any]):
    with pytest.raises(WeightsError):
        Manifest.from_wire({**make().to_wire(), **change})


@pytest.mark.parametrize("name", [name for name in Manifest.__slots__ if name != "epoch"])
def test_a_missing_field_is_refused(name: str):
    fields = make().to_wire()
    del fields[name]
    with pytest.raises(WeightsError, match=name):
        Manifest.from_wire(fields)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=24),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(changes=st.dictionaries(st.sampled_from(Manifest.__slots__), plain, min_size=1, max_size=3))
def test_a_fuzzed_field_gives_a_consistent_manifest_or_a_weights_error(changes: dict[str, Any]):
    try:
        manifest = Manifest.from_wire({**make().to_wire(), **changes})
    except WeightsError:
        return
    manifest.check()
    assert all(0 <= t.offset <= t.offset + t.nbytes <= manifest.nbytes for t in manifest.tensors)


@given(fields=plain)
def test_anything_that_is_no_manifest_is_a_weights_error(fields: Any):
    with pytest.raises(WeightsError):
        Manifest.from_wire(fields)


@pytest.mark.parametrize("nbytes", [0, 1, 256 << 10, (1 << 20) + 3])
def test_a_copy_has_the_checksum_of_its_chunk(nbytes):
    source, target = np.random.default_rng(0).bytes(nbytes), bytearray(nbytes)
    assert copy_checksum(memoryview(target), memoryview(source)) == xxhash.xxh3_64_intdigest(source)
    assert target == source
