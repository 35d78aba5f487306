"""After a run nothing is left, however its launcher ended: no process, no shared memory, no temporary file."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from async_rl.launch.janitor import RUN_VARIABLE
from tests.system.conftest import (
    command,
    environment,
    overrides,
    processes_of,
    server_of,
    start,
    steps_of,
    summary_of,
    wait_until,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

GONE_S = 10.0
"""What is promised."""


def token_of(out: Path) -> bytes:
    """The variable that the processes of a run inherit, as its server has it."""
    environ = Path(f"/proc/{server_of(out)['pid']}/environ").read_bytes().split(b"\0")
    return next(entry for entry in environ if entry.startswith(RUN_VARIABLE.encode()))


def temporary_of(out: Path) -> Path:
    environ = Path(f"/proc/{server_of(out)['pid']}/environ").read_bytes().split(b"\0")
    return Path(next(entry for entry in environ if entry.startswith(b"TMPDIR=")).decode().partition("=")[2])


def carriers(token: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if token in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def segments_of(out: Path) -> list[Path]:
    return list(Path("/dev/shm").glob(f"async_rl-{server_of(out)['run_id']}-*"))


@pytest.fixture
def endless(small, tmp_path):
    """A run that goes on until it is ended, with a verifier that starts something of its own."""
    return small | {
        "steps": 5000,
        "eval.every": 0,
        "buffer.heartbeat_s": 1.0,
        "task.verifier": "user_verifiers:starts_a_process",
    }


def test_after_a_launcher_that_was_killed_nothing_of_its_run_is_left(tmp_path, endless):
    out = tmp_path / "run"
    launcher = start("run", "arithmetic", *overrides(endless), "--out", str(out), log=tmp_path / "run.log")
    try:
        wait_until(lambda: steps_of(out) >= 2, "two steps")
        token, temporary = token_of(out), temporary_of(out)
        assert len(carriers(token)) >= 6  # server, learner, actor, evaluator, verifiers and what they have started
        assert segments_of(out)
        assert temporary.is_dir()
        launcher.kill()
        wait_until(
            lambda: not carriers(token) and not segments_of(out) and not temporary.exists(), "the end of all", GONE_S
        )
    finally:
        launcher.kill()
        launcher.wait(10)
    wait_until(lambda: not processes_of(out), "the janitor's own end", GONE_S)
    assert "processes ended" in wait_until(lambda: (out / "logs" / "janitor.log").read_text(), "the janitor's line")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143)])
def test_a_terminal_that_is_lost_stops_the_run_in_order(tmp_path, endless, number, code):
    out = tmp_path / "run"
    reader, writer = os.openpty()
    arguments = command("run", "arithmetic", *overrides(endless | {"checkpoint.every": 0}), "--out", str(out))
    launcher = subprocess.Popen(arguments, stdout=writer, stderr=writer, env=environment(), start_new_session=True)
    os.close(writer)
    try:
        wait_until(lambda: steps_of(out) >= 2, "two steps")
        token = token_of(out)
        os.close(reader)  # from now on every write fails with EIO
        launcher.send_signal(number)
        assert launcher.wait(60) == code
    finally:
        launcher.kill()
        launcher.wait(10)
    assert summary_of(out)["status"] == "stopped"
    assert list(out.glob("checkpoints/step_*/trainer.json"))
    assert not carriers(token)
    assert not processes_of(out)
    assert not segments_of(out)


def is_listening(process: subprocess.Popen) -> bool:
    """Whether it has taken over SIGHUP, as the first thing that it does."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGHUP - 1) & 1)


@pytest.mark.parametrize("delay_s", [0.0, 1.0, 3.0])
def test_ctrl_c_in_the_first_seconds_is_one_sentence_and_leaves_nothing(tmp_path, small, delay_s):
    out, log = tmp_path / "run", tmp_path / "run.log"
    launcher = start("run", "arithmetic", *overrides(small | {"steps": 5000}), "--out", str(out), log=log)
    try:
        wait_until(lambda: is_listening(launcher), "its first step", GONE_S)
        time.sleep(delay_s)  # somewhere in its imports, its checks or the start of its processes
        launcher.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert launcher.wait(60) == 130, log.read_text()
        assert time.monotonic() - began < 30
    finally:
        launcher.kill()
        launcher.wait(10)
    said = log.read_text()
    assert "Traceback" not in said
    assert "stopped" in said
    assert not processes_of(out)
    assert not out.is_dir() or summary_of(out)["status"] == "stopped"
