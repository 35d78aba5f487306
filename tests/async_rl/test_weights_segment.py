"""Segments: files in /dev/shm that outlive their writer until somebody unlinks them."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.errors import WeightsError
from async_rl.weights.manifest import Manifest, chunk_checksums, combine
from async_rl.weights.segment import SLOTS, Segment, SegmentReader, segment_path, unlink_run


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    unlink_run(name)


def manifest_of(data: bytes, run_id: str, slot: str) -> Manifest:
    chunks = chunk_checksums(memoryview(data), 1024)
    return Manifest(
        version=0,
        run_id=run_id,
        tensors=(),
        nbytes=len(data),
        chunk_bytes=1024,
        chunks=chunks,
        checksum=combine(chunks),
        segment=str(segment_path(run_id, slot)),
        host="",
    )


def test_a_reader_sees_what_was_written_and_cannot_write(run_id: str):
    data = os.urandom(10_000)
    segment = Segment(run_id, "0", len(data))
    segment.data[:] = data
    view = SegmentReader().open(manifest_of(data, run_id, "0"))
    assert bytes(view) == data
    assert view.readonly


def test_only_the_user_can_read_it(run_id: str):
    assert Segment(run_id, "eval", 10).path.stat().st_mode & 0o777 == 0o600


def test_a_left_over_file_of_the_same_size_is_used_again(run_id: str):
    first = Segment(run_id, "0", 100)
    inode = first.path.stat().st_ino
    assert Segment(run_id, "0", 100).path.stat().st_ino == inode


def test_another_size_is_a_new_file_and_old_mappings_keep_their_bytes(run_id: str):
    old = Segment(run_id, "0", 8)
    old.data[:] = b"oldbytes"
    reader = SegmentReader()
    view = reader.open(manifest_of(b"oldbytes", run_id, "0"))
    new = Segment(run_id, "0", 4)
    new.data[:] = b"new!"
    assert bytes(view) == b"oldbytes"
    assert bytes(reader.open(manifest_of(b"new!", run_id, "0"))) == b"new!"


def test_a_reader_maps_a_segment_once(run_id: str):
    Segment(run_id, "1", 8)
    reader = SegmentReader()
    manifest = manifest_of(bytes(8), run_id, "1")
    assert reader.open(manifest) is reader.open(manifest)


def test_a_segment_of_another_size_is_refused(run_id: str):
    Segment(run_id, "0", 8)
    with pytest.raises(WeightsError, match="has 8 bytes, the manifest says 9"):
        SegmentReader().open(manifest_of(bytes(9), run_id, "0"))


def test_a_missing_segment_is_refused(run_id: str):
    with pytest.raises(WeightsError, match="No such file"):
        SegmentReader().open(manifest_of(bytes(9), run_id, "0"))


@pytest.mark.parametrize("path", ["/etc/passwd", "/dev/shm/../../etc/passwd", "/dev/shm/async_rl-other-0"])
def test_a_manifest_cannot_name_any_other_file(run_id: str, path: str):
    fields = manifest_of(bytes(9), run_id, "0").to_wire()
    with pytest.raises(WeightsError, match="no segment of"):
        SegmentReader().open(Manifest.from_wire({**fields, "segment": path}))


def test_a_link_is_not_followed(run_id: str, tmp_path: Path):
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    segment_path(run_id, "0").symlink_to(target)
    with pytest.raises(WeightsError, match="cannot create"):
        Segment(run_id, "0", 8)
    with pytest.raises(WeightsError, match="cannot open"):
        SegmentReader().open(manifest_of(b"precious", run_id, "0"))
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("run_id_", ["", "a/b", "../x", "a*"])
def test_a_run_id_is_a_plain_name(run_id_: str):
    with pytest.raises(WeightsError, match="run id"):
        unlink_run(run_id_)


def test_too_little_shared_memory_is_said_with_the_bytes_and_leaves_nothing(run_id: str):
    with pytest.raises(WeightsError, match=r"1,125,899,906,842,624 bytes are needed .* free; enlarge it"):
        Segment(run_id, "0", 1 << 50)
    assert not segment_path(run_id, "0").exists()


def test_unlink_run_takes_all_slots_of_this_run_only(run_id: str):
    for slot in SLOTS:
        Segment(run_id, slot, 8)
    longer = f"{run_id}-0"  # its files start with the same letters
    Segment(longer, "0", 8)
    try:
        assert unlink_run(run_id) == [segment_path(run_id, slot) for slot in SLOTS]
        assert segment_path(longer, "0").exists()
        assert unlink_run(run_id) == []
    finally:
        unlink_run(longer)


@pytest.mark.real
def test_a_killed_writer_leaves_segments_that_unlink_run_removes(run_id: str):
    code = (
        "import os, signal, sys; from async_rl.weights.segment import Segment; s = Segment(sys.argv[1], '0', 8); "
        "s.data[:] = b'survives'; os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, run_id], timeout=60, check=False).returncode == -9
    view = SegmentReader().open(manifest_of(b"survives", run_id, "0"))
    assert unlink_run(run_id) == [segment_path(run_id, "0")]
    assert bytes(view) == b"survives"
    assert not list(Path("/dev/shm").glob(f"async_rl-{run_id}-*"))
