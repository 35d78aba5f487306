"""Mapping the learner's segments and staging bytes of our own."""

import os

import pytest

from actors.engines.segments import Segments, Staging
from async_rl.errors import WeightsError


def test_a_mapping_shows_what_is_written_to_the_file_later(tmp_path):
    path, segments = tmp_path / "s", Segments()
    path.write_bytes(b"abcdef")
    assert bytes(segments.map(str(path), 4)) == b"abcd"
    with path.open("r+b") as file:
        file.write(b"xy")
    assert bytes(segments.map(str(path), 6)) == b"xycdef"


def test_a_file_that_was_replaced_is_mapped_again(tmp_path):
    path, segments = tmp_path / "s", Segments()
    path.write_bytes(b"old")
    segments.map(str(path), 3)
    (tmp_path / "n").write_bytes(b"newer")
    os.rename(tmp_path / "n", path)
    assert bytes(segments.map(str(path), 5)) == b"newer"


def test_a_file_that_has_another_name_is_not_mapped_again(tmp_path):
    path, segments = tmp_path / "1", Segments()
    path.write_bytes(b"abc")
    segments.map(str(path), 3)
    (tmp_path / "another").write_bytes(b"x")
    os.rename(path, tmp_path / "2")
    segments.map(str(tmp_path / "another"), 1)  # what is gone is forgotten now
    assert bytes(segments.map(str(tmp_path / "2"), 3)) == b"abc"
    with open("/proc/self/maps") as maps:
        assert sum(str(tmp_path) in line for line in maps) == 2
    segments.close()


def test_only_a_few_files_stay_mapped(tmp_path):
    segments = Segments()
    for i in range(9):
        path = tmp_path / str(i)
        path.write_bytes(b"x")
        segments.map(str(path), 1)
    with open("/proc/self/maps") as maps:
        assert sum(str(tmp_path) in line for line in maps) == 4


def test_a_missing_or_short_file_is_an_error_that_names_it(tmp_path):
    (tmp_path / "s").write_bytes(b"abc")
    with pytest.raises(WeightsError, match="has 3 bytes, 4 were published"):
        Segments().map(str(tmp_path / "s"), 4)
    with pytest.raises(WeightsError, match="none cannot be opened: No such file"):
        Segments().map(str(tmp_path / "none"), 4)


def test_staged_bytes_are_read_under_their_path_until_closed():
    staging, segments = Staging(), Segments()
    path = staging.write(memoryview(b"first"))
    assert bytes(segments.map(path, 5)) == b"first"
    assert staging.write(memoryview(b"other")) == path
    assert bytes(segments.map(path, 5)) == b"other"
    longer = staging.write(memoryview(b"a longer one"))
    assert bytes(segments.map(longer, 12)) == b"a longer one"
    staging.close()
    with pytest.raises(WeightsError):
        segments.map(longer, 12)
