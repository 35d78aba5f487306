from __future__ import annotations

import errno
import json
import os
import resource
import sys
from contextlib import contextmanager

import pytest
from server_helpers import config, lines
from service_helpers import Bench

from async_rl.buffer import files as files_module
from async_rl.buffer.files import RunFiles
from async_rl.buffer.line_file import LineFile
from async_rl.errors import ConfigError
from async_rl.output import Output


@contextmanager
def full_disk(size):
    """No file of this process can grow beyond ``size`` bytes: the kernel writes what fits, then refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    stdout, sys.stdout = sys.stdout, Output(sys.stdout)  # it is a file, too
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.stdout = stdout


def no_space():
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def files(tmp_path):
    files = RunFiles(tmp_path)
    yield files
    files.close()


def test_a_full_disk_loses_no_line_and_is_told_of_once(files, tmp_path, capsys):
    rows = [{"step": step, "ordinals": list(range(9))} for step in range(8)]
    files.append("batches", rows[0])
    files.flush()
    with full_disk(100):  # in the middle of the third line
        for row in rows[1:6]:
            files.append("batches", row)
            files.flush()
        files.replace("books", {"step": 5, "filler": "x" * 200})
        cut = (tmp_path / "batches.jsonl").read_bytes()
        assert len(cut) == 100
        assert not cut.endswith(b"\n")
        assert not (tmp_path / "books.json").exists()
        assert "cannot write the run folder" in files.trouble
        assert [row["step"] for row in files.rows("batches")] == [0, 1, 2, 3, 4, 5], "the cut line and what waits"
    for row in rows[6:]:
        files.append("batches", row)
    files.flush()
    assert files.trouble == ""
    assert lines(tmp_path / "batches.jsonl") == rows
    assert json.loads((tmp_path / "books.json").read_text())["step"] == 5
    output = capsys.readouterr().out
    assert output.count("warning: cannot write") == 1
    assert output.count("can be written again") == 1
    assert not list(tmp_path.glob("*.part"))


def test_only_the_oldest_telemetry_is_dropped_while_the_disk_is_full(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files_module, "MOST_TELEMETRY", 500)
    files = RunFiles(tmp_path)
    with full_disk(10):
        for i in range(50):
            files.append("timeline", {"i": i, "filler": "x" * 80})
            files.append("batches", {"step": i, "filler": "x" * 80})
            files.flush()
    files.flush()
    files.close()
    assert [row["step"] for row in lines(tmp_path / "batches.jsonl")] == list(range(50))
    kept = [row["i"] for row in lines(tmp_path / "timeline.jsonl")]
    assert kept[0] == 0, "it had begun when the disk was full: without its rest the file would hold half a line"
    assert kept[1:] == list(range(50))[-len(kept[1:]) :]
    assert 2 <= len(kept) <= 6
    assert f"{50 - len(kept)} lines of telemetry were dropped" in capsys.readouterr().out


def test_lines_are_dropped_from_the_end_without_any_space(files, tmp_path):
    for step in range(5):
        files.append("batches", {"step": step})
    files.flush()
    with full_disk(1):
        files.keep("batches", lambda row: row["step"] < 3)
    assert lines(tmp_path / "batches.jsonl") == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert files.trouble == ""


def test_lines_that_cannot_be_dropped_yet_are_dropped_later_and_never_seen_again(files, tmp_path):
    for step in range(5):
        files.append("samples", {"ordinal": step})
    files.flush()
    with full_disk(1):
        files.keep("samples", lambda row: row["ordinal"] not in (1, 3))
        files.append("samples", {"ordinal": 7})
        files.flush()
        assert [row["ordinal"] for row in files.rows("samples")] == [0, 2, 4, 7]
        assert files.trouble
    files.flush()
    assert [row["ordinal"] for row in lines(tmp_path / "samples.jsonl")] == [0, 2, 4, 7]
    files.append("samples", {"ordinal": 8})
    files.flush()
    assert [row["ordinal"] for row in lines(tmp_path / "samples.jsonl")] == [0, 2, 4, 7, 8]


@pytest.mark.parametrize("whole", ["", '{"a": 1}\n', '{"a": 1}\n' + '{"b": "%s"}\n' % ("x" * 200_000)])
@pytest.mark.parametrize("rest", ["", '{"cut', "y" * 150_000])
def test_a_last_line_that_a_crash_cut_short_is_removed(tmp_path, whole, rest):
    path = tmp_path / "timeline.jsonl"
    path.write_text(whole + rest)
    file = LineFile(path)
    file.mend()
    file.append('{"c": 3}')
    file.write()
    file.close()
    assert path.read_text() == whole + '{"c": 3}\n'


def test_a_folder_that_cannot_be_used_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the run folder"):
        RunFiles(tmp_path / "file")
    (tmp_path / "run" / "evals.jsonl").mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="cannot write the run folder"):
        RunFiles(tmp_path / "run")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_run_goes_on_over_a_full_disk_and_its_status_says_so(tmp_path):
    bench = Bench(config(steps=6), tmp_path)
    bench.learner()
    bench.join("actor", "a")
    bench.live("a", 0)
    with full_disk(1):
        for step in range(2):
            bench.submit("a", bench.tickets("a", 2))
            assert bench.shard(step)
            assert [h["type"] for h in bench.train(step)] == ["trained"]
            bench.live("a", step + 1)
        bench.tick(0.1)
        assert any("cannot write the run folder" in text for text in bench.service.account.glance()["notices"])
        assert (tmp_path / "batches.jsonl").read_bytes() == b"{"
    bench.tick(0.1)
    assert [row["step"] for row in lines(tmp_path / "batches.jsonl")] == [0, 1]
    (left,) = bench.service.account.glance()["notices"]
    assert "the journal cannot be written, until the next checkpoint" in left
    bench.ledger.compact()  # as after a checkpoint
    bench.tick(0.1)
    assert bench.service.account.glance()["notices"] == []
    assert json.loads((tmp_path / "books.json").read_text())["step"] == 2
    bench.service.close()


def test_rows_that_waited_for_space_when_the_server_died_are_in_the_journal(tmp_path):
    bench = Bench(config(steps=6), tmp_path)
    bench.learner()
    bench.join("actor", "a")
    bench.live("a", 0)
    file = bench.files._lines["batches"]
    file.write = no_space
    for step in range(2):
        bench.submit("a", bench.tickets("a", 2))
        bench.shard(step)
        bench.train(step)
        bench.live("a", step + 1)
    again = bench.recover()
    assert [row["step"] for row in lines(tmp_path / "batches.jsonl")] == [0, 1]
    assert again.ledger.books()["trained"] == 4
