"""The whole-run comparison of overlap and turns: its arithmetic, and that each side is really bound to its core."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench_async import SKIPPED, bind, steps_per_second

# starts a module of that name, says its pid, and both stay until their input ends
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "actors.stays"], stdin=-1, stdout=-1, cwd=sys.argv[1])
assert child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
child.communicate()
"""


def test_steps_a_second_leave_out_the_first_ones():
    slow = [{"step": s, "time": 10.0 * s, "time/step_s": 10.0} for s in range(SKIPPED)]
    begin = 10.0 * SKIPPED
    fast = [{"step": SKIPPED + s, "time": begin + 0.25 * s, "time/step_s": 0.25} for s in range(9)]
    assert steps_per_second([*slow, *fast, {"step": 99, "note": "no step"}]) == pytest.approx(4.0)


def test_actors_go_to_the_first_core_and_all_others_to_the_second(tmp_path):
    (tmp_path / "actors").mkdir()
    (tmp_path / "actors" / "__init__.py").touch()  # before the package of that name that is installed
    (tmp_path / "actors" / "stays.py").write_text("import sys; print(flush=True); sys.stdin.read()")
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("one core")
    before = os.sched_getaffinity(0)
    command = [sys.executable, "-c", PARENT, str(tmp_path), "--set", "actors.count=1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        actor = int(parent.stdout.readline())
        bind(parent.pid, cores)
        assert os.sched_getaffinity(actor) == {cores[0]}
        assert os.sched_getaffinity(parent.pid) == {cores[1]}
        assert os.sched_getaffinity(0) == before  # who only started the run is left alone
        parent.stdin.close()
        assert parent.wait(10) == 0
