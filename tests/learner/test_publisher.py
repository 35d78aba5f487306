"""The publisher: bytes, slots and casts."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import xxhash

from async_rl.errors import ConfigError, WeightsError
from async_rl.process import host_id
from async_rl.weights.manifest import Manifest, Tensor
from async_rl.weights.segment import SegmentReader, unlink_run
from learner.publisher import Publisher

LAYOUT = [("a.weight", (3, 5), 0, 15), ("b.bias", (7,), 16, 7)]  # element 15 is padding
NUM_FLAT = 30  # 23 published, the rest belongs to others


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    unlink_run(name)


def flat_of(seed: int) -> torch.Tensor:
    return torch.randn(NUM_FLAT, generator=torch.Generator().manual_seed(seed))


def read(manifest: Manifest) -> bytes:
    view = SegmentReader().open(manifest)
    manifest.verify(view)
    return bytes(view)


def test_the_bytes_of_every_tensor_arrive(run_id: str):
    publisher, flat = Publisher(run_id, LAYOUT, chunk_bytes=16), flat_of(0)
    manifest = publisher.publish(flat, 0, evaluated=False)
    assert manifest.tensors == (Tensor("a.weight", "float32", (3, 5), 0), Tensor("b.bias", "float32", (7,), 64))
    assert manifest.nbytes == publisher.nbytes == 23 * 4
    assert len(manifest.chunks) == 6  # 92 bytes in chunks of 16
    assert manifest.host == host_id()
    assert read(manifest) == flat[:23].numpy().tobytes()
    assert publisher.publish_s > 0
    assert Manifest.from_wire(manifest.to_wire()) == manifest


def test_bfloat16_rounds_to_nearest_even(run_id: str):
    publisher = Publisher(run_id, LAYOUT, chunk_bytes=16, dtype="bfloat16")
    flat = flat_of(1)
    # bfloat16 keeps 7 bits after the point: 1 + 2^-8 is half-way and goes to 1; 1 + 3 * 2^-8 goes to 1 + 2^-6
    flat[:3] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -2.5])
    manifest = publisher.publish(flat, 0, evaluated=False)
    assert manifest.tensors[1] == Tensor("b.bias", "bfloat16", (7,), 32)
    bits = np.frombuffer(read(manifest), "<u2")
    assert bits.size == 23
    as_float = (bits.astype(np.uint32) << 16).view(np.float32)
    assert as_float[:3].tolist() == [1.0, 1 + 2**-6, -2.5]
    # independent: round half to even on the upper 16 bits of each float32
    full = flat[:23].numpy().view(np.uint32).astype(np.uint64)
    np.testing.assert_array_equal(bits, (full + 0x7FFF + ((full >> 16) & 1)) >> 16)


def test_versions_alternate_between_two_slots_and_evaluated_ones_stay_in_a_third(run_id: str):
    publisher = Publisher(run_id, LAYOUT, chunk_bytes=16)
    manifests = [publisher.publish(flat_of(v), v, evaluated=v == 0) for v in range(4)]
    assert [m.segment.rpartition("-")[2] for m in manifests] == ["eval", "1", "0", "1"]
    assert read(manifests[0]) == flat_of(0)[:23].numpy().tobytes()
    assert read(manifests[2]) == flat_of(2)[:23].numpy().tobytes()
    with pytest.raises(WeightsError, match="version 1: chunk 0"):  # version 3 was written over it
        read(manifests[1])


def test_the_checksum_is_of_the_bytes_alone(run_id: str):
    publisher, flat = Publisher(run_id, LAYOUT, chunk_bytes=16), flat_of(0)
    first, again = publisher.publish(flat, 0, evaluated=True), publisher.publish(flat, 1, evaluated=False)
    assert first.checksum == again.checksum
    flat[22] += 1
    assert publisher.publish(flat, 2, evaluated=False).checksum != first.checksum


def test_close_unlinks_but_readers_keep_their_bytes(run_id: str):
    publisher = Publisher(run_id, LAYOUT, chunk_bytes=16)
    manifest = publisher.publish(flat_of(0), 0, evaluated=False)
    view = SegmentReader().open(manifest)
    publisher.close()
    assert not list(Path("/dev/shm").glob(f"async_rl-{run_id}-*"))
    manifest.verify(view)


def test_a_host_that_is_too_small_is_found_at_the_start_and_nothing_stays(run_id: str):
    with pytest.raises(WeightsError, match="too small"):
        Publisher(run_id, [("huge", (1 << 48,), 0, 1 << 48)], chunk_bytes=16)
    assert unlink_run(run_id) == []


def test_a_chunk_that_splits_an_element_is_refused(run_id: str):
    with pytest.raises(ConfigError, match=r"weights.chunk_bytes = 1026"):
        Publisher(run_id, LAYOUT, chunk_bytes=1026)


@pytest.mark.parametrize("flat", [torch.zeros(22), torch.zeros(30, dtype=torch.float64), torch.zeros(5, 6)])
def test_a_flat_vector_that_does_not_fit_the_layout_is_refused(run_id: str, flat: torch.Tensor):
    with pytest.raises(ValueError, match="flat must be float32"):
        Publisher(run_id, LAYOUT, chunk_bytes=16).publish(flat, 0, evaluated=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_vector_arrives_equal(run_id: str):
    flat = flat_of(2)
    for dtype in ("float32", "bfloat16"):
        publisher = Publisher(run_id, LAYOUT, chunk_bytes=16, dtype=dtype)
        assert read(publisher.publish(flat.cuda(), 0, evaluated=False)) == read(
            publisher.publish(flat, 1, evaluated=False)
        )
        publisher.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_that_are_copied_in_parts_have_the_checksums_of_their_bytes(
    run_id: str, dtype: Literal["float32", "bfloat16"]
):
    numel = 400_001
    publisher = Publisher(run_id, [("w", (numel,), 0, numel)], chunk_bytes=1 << 20, dtype=dtype)
    flat = torch.rand(numel, generator=torch.Generator().manual_seed(0))
    manifest = publisher.publish(flat, 0, evaluated=False)
    held = flat.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    assert manifest.chunks == tuple(
        xxhash.xxh3_64_intdigest(held[i : i + (1 << 20)]) for i in range(0, len(held), 1 << 20)
    )
    assert read(manifest) == held
