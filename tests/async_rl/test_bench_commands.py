"""The options of ``async-rl bench``, and that whoever ends it early finds nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

_BENCH = [sys.executable, "-m", "async_rl", "bench"]
_LONGEST_S = 120.0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["transport", "--out", "/nowhere/a.json"], "/nowhere/a.json: no file can be written there"),
        (["utilization", "--plot", "/nowhere/a.svg"], "/nowhere/a.svg: no file can be written there"),
        (["buffer", "--out", "/tmp"], "/tmp: no file can be written there"),
        (["utilization", "--seconds", "inf"], "--seconds"),
        (["utilization", "--step-s", "1e300"], "--step-s"),
        (["buffer", "--seconds", "inf"], "--seconds"),
        (["weights", "--megabytes", "inf"], "--megabytes"),
        (["transport", "--bytes", "900000GiB"], "do not fit into memory"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anything_is_measured(options: list[str], part: str) -> None:
    done = subprocess.run([*_BENCH, *options], capture_output=True, text=True, timeout=_LONGEST_S, check=False)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.real
@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGTERM, ["transport", "--repeats", "10000", "--bytes", "64KiB"]),
        (signal.SIGHUP, ["weights", "--megabytes", "1", "--repeats", "1000000"]),
    ],
)
def test_a_benchmark_that_is_ended_leaves_nothing(tmp_path: Path, number: signal.Signals, options: list[str]) -> None:
    before = segments()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen([*_BENCH, *options], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: any(tmp_path.iterdir()), 40)
        child.send_signal(number)
        _, said = child.communicate(timeout=_LONGEST_S)
    finally:
        child.kill()
        child.wait(10)
    assert child.returncode == 128 + number
    assert "Traceback" not in said
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("async-rl-bench", "tmp"))]
    assert not [name for name in segments() - before if "bench" in name]


@pytest.mark.real
def test_a_benchmark_that_is_ended_takes_its_child_with_it() -> None:
    options = ["learner", "--case", "arithmetic", "--sequences", "16", "--repeats", "1000"]
    parent = subprocess.Popen([*_BENCH, *options], stderr=subprocess.DEVNULL)
    try:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        eventually(lambda: children.read_text().split(), 40)
        (pid,) = children.read_text().split()
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(_LONGEST_S) == 128 + signal.SIGTERM
        assert not Path(f"/proc/{pid}").exists()
    finally:
        parent.kill()
        parent.wait(10)


def eventually(condition: Callable[[], object], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}
