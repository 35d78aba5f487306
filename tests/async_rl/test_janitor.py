"""The janitor with small processes: it ends what carries its token, and nothing else."""

import json
import os
import select
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from async_rl.launch.janitor import RUN_VARIABLE, Janitor, members, sweep
from async_rl.weights.segment import segment_path

pytestmark = pytest.mark.real

# A launcher: one child in its own session, that ignores SIGTERM, beside the janitor; then it waits to be killed.
LAUNCHER = """
import os, subprocess, sys, threading
from pathlib import Path
from async_rl.launch.janitor import Janitor
with Janitor() as janitor:
    janitor.watch(Path(sys.argv[1]))
    deaf = "import signal, threading; signal.signal(15, signal.SIG_IGN); threading.Event().wait(60)"
    child = subprocess.Popen(
        [sys.executable, "-c", deaf],
        env=janitor.environment(os.environ), start_new_session=True,
    )
    print(janitor.pid, child.pid, janitor.token, janitor.temporary, flush=True)
    sys.stdin.readline()
    sys.exit(5) if len(sys.argv) > 2 else None
"""


def alive(token):
    environment = {**os.environ, RUN_VARIABLE: token}
    return subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True)


def ends(pid_handle, timeout_s=10.0):
    return bool(select.select([pid_handle], [], [], timeout_s)[0])


def test_a_sweep_ends_whoever_carries_the_token_and_nobody_else():
    token, other = uuid.uuid4().hex, uuid.uuid4().hex
    mine, theirs = [alive(token), alive(token)], alive(other)
    try:
        assert sorted(members(token)) == sorted(p.pid for p in mine)
        assert sweep(token, 5.0) == 2
        assert [p.wait(5) for p in mine] == [-signal.SIGKILL] * 2
        assert theirs.poll() is None
        assert members(token[:-1]) == []  # a part of a token is another token
    finally:
        for process in (*mine, theirs):
            process.kill()
            process.wait(5)


@pytest.mark.parametrize("how", ["killed", "in order", "by an error"])
def test_however_a_launcher_ends_its_processes_segments_and_temporary_files_are_gone(tmp_path, how):
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    (tmp_path / "server.json").write_text(json.dumps({"run_id": run_id}))
    segment = segment_path(run_id, "0")
    segment.write_bytes(b"x")
    arguments = [sys.executable, "-c", LAUNCHER, str(tmp_path), *(["error"] if how == "by an error" else [])]
    pipe = subprocess.PIPE
    launcher = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    try:
        janitor, child, _, temporary = launcher.stdout.readline().split()
        handles = [os.pidfd_open(int(pid)) for pid in (janitor, child)]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.pidfd_send_signal(handles[0], number)  # it is deaf
        Path(temporary, "a socket").touch()
        assert not ends(handles[1], 0.5)
        if how == "killed":
            launcher.kill()
        else:
            launcher.stdin.write("\n")
            launcher.stdin.flush()
        assert [ends(handle) for handle in handles] == [True, True]
        assert launcher.wait(10) == {"killed": -signal.SIGKILL, "in order": 0, "by an error": 5}[how]
        assert not segment.exists()
        assert not Path(temporary).exists()
        for handle in handles:
            os.close(handle)
    finally:
        launcher.kill()
        launcher.wait(10)
        launcher.stdin.close()
        launcher.stdout.close()
        segment.unlink(missing_ok=True)


def test_the_janitor_is_small_and_a_launcher_does_without_one_that_was_killed(tmp_path):
    with Janitor() as janitor:
        janitor.watch(tmp_path)
        status = Path(f"/proc/{janitor.pid}/status")
        # it reads its first order only once it is up, and needs no more until the launcher ends
        handle = os.pidfd_open(janitor.pid)
        assert not ends(handle, 0.7)
        resident = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
        assert int(resident.split()[1]) < 20_000  # kB
        os.kill(janitor.pid, signal.SIGKILL)
        assert ends(handle)
        os.close(handle)
        janitor.watch(tmp_path)
    assert not any(tmp_path.iterdir())
    assert not Path(janitor.temporary).exists()
