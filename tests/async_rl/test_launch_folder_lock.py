"""One launcher at a time in a run folder, its janitor included."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.launch import folder_lock
from async_rl.launch.folder_lock import FolderLock
from async_rl.launch.interrupts import Interrupts

_LAUNCHER = """
import sys
from pathlib import Path
from async_rl.launch.folder_lock import FolderLock
from async_rl.launch.interrupts import Interrupts
from async_rl.launch.janitor import Janitor
with FolderLock(Path(sys.argv[1]), Interrupts(), print) as lock, Janitor([lock]) as janitor:
    print(janitor.pid, janitor.temporary, flush=True)
    sys.stdin.read()
"""


def test_a_folder_in_use_is_refused_and_free_again_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "WAIT_S", 0.3)
    said: list[str] = []
    with (
        FolderLock(tmp_path, Interrupts(), said.append),
        pytest.raises(ConfigError, match="another async-rl works in"),
        FolderLock(tmp_path, Interrupts(), said.append),
    ):
        pass
    assert said == [f"{tmp_path} is in use; waiting up to 0 s for its end"]
    with FolderLock(tmp_path, Interrupts(), said.append):
        assert not list(tmp_path.iterdir())  # a new run's folder must stay empty


def test_after_a_launcher_was_killed_the_folder_is_held_until_its_janitor_has_cleaned_up(tmp_path):
    command = [sys.executable, "-c", _LAUNCHER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        pid, temporary = launcher.stdout.readline().split()
        janitor = int(pid)
        os.kill(janitor, signal.SIGSTOP)
        launcher.kill()
    interrupts, said = Interrupts(), []

    def say(text: str) -> None:
        said.append(text)
        os.kill(janitor, signal.SIGCONT)

    with FolderLock(tmp_path, interrupts, say):
        assert len(said) == 1
        assert not Path(temporary).exists()


def test_who_waits_for_a_folder_can_be_interrupted(tmp_path):
    with FolderLock(tmp_path, Interrupts(), print), Interrupts() as interrupts:

        def say(_: str) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(AsyncRLError, match="interrupted while waiting"), FolderLock(tmp_path, interrupts, say):
            pass
