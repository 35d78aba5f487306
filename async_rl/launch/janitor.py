"""Cleans up after a launcher that was killed: nothing of its run is left, whoever ended first.

    launcher ── starts, before anything else ─► janitor (own session, deaf to Ctrl-C, SIGTERM and a lost terminal)
       │  "run FOLDER", "end" through a pipe      │ the launcher ends, by "end" or by its death
       ▼                                          ▼
    processes with ASYNC_RL_RUN=<token>        kill whoever has that variable, unlink segments and temporary files

    python -m async_rl.launch.janitor LAUNCHER_PID TOKEN TEMPORARY_FOLDER

Children ask the kernel to die with their parent; what a user's code or an engine starts does not. The variable is
inherited by all of them, and TMPDIR with it: sockets and files that a killed process leaves lie in one folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType

from async_rl.weights.leftovers import unlink_unused

RUN_VARIABLE = "ASYNC_RL_RUN"
"""Environment variable that all processes of a run inherit; names its launcher's life."""
CLEAN_S = 30.0
"""Longest time for killed processes to vanish: one in the kernel's hands may need some."""
_LOOK_S = 5.0
_GOODBYE_S = 10.0


class Janitor:
    """The launcher's end: starts the process, ends it in order. Use as a context manager.

    Args:
        holds: descriptors that it keeps open as long as it lives, such as the run folder's lock.
    """

    def __init__(self, holds: Collection[int] = ()) -> None:
        self.token = secrets.token_hex(8)
        self.temporary = tempfile.mkdtemp(prefix="async_rl-")
        """Folder for temporary files of the run's processes; removed at the end."""
        command = [sys.executable, "-m", "async_rl.launch.janitor", str(os.getpid()), self.token, self.temporary]
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
            pass_fds=tuple(holds),
            preexec_fn=_be_deaf,
        )

    def __enter__(self) -> Janitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell("end")
        try:
            self._process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_GOODBYE_S)
        finally:
            assert self._process.stdin is not None
            self._process.stdin.close()
            shutil.rmtree(self.temporary, ignore_errors=True)  # if it was killed

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Environment for the processes of the run."""
        return {**base, RUN_VARIABLE: self.token, "TMPDIR": self.temporary}

    def watch(self, folder: Path) -> None:
        """Tell it the run folder, whose ``server.json`` names the run's segments."""
        self._tell(f"run {folder.resolve()}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # a janitor that was killed is no reason to end a run: the kernel still ends our children with us
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())


def _be_deaf() -> None:
    """Ignored signals stay ignored in the program that follows, so there is no moment in which one would end it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def members(token: str) -> list[int]:
    """Processes of this user that carry the token, this one left out."""
    pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and _carries(pid, token)]


def sweep(token: str, timeout_s: float) -> int:
    """Kill every process that carries the token and wait until none is left; returns how many there were."""
    ended: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while (alive := members(token)) and time.monotonic() < deadline:
        for pid in alive:
            if _kill(pid, token):
                ended.add(pid)
    return len(ended)


def _carries(pid: int, token: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or belongs to another user
        return False
    return f"{RUN_VARIABLE}={token}".encode() in environment.split(b"\0")


def _kill(pid: int, token: str) -> bool:
    """Kill through a handle, so that a number that was given away meanwhile hits nobody; waits a moment for its end."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not _carries(pid, token):
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        select.select([handle], [], [], 0.5)
        return True
    finally:
        os.close(handle)


def await_end(launcher: int, orders: int) -> Path | None:
    """Wait until the launcher says "end" or has died; the run folder, if it named one.

    Args:
        launcher: process id of our parent.
        orders: descriptor from which its lines are read.
    """
    try:
        handle = os.pidfd_open(launcher)
    except ProcessLookupError:
        handle = -1
    watched = [fd for fd in (orders, handle) if fd >= 0]
    text, folder = b"", None
    while True:
        ready, _, _ = select.select(watched, [], [], _LOOK_S)
        if orders in ready:
            new = os.read(orders, 65_536)
            text += new
            *lines, text = text.split(b"\n")
            for line in lines:
                kind, _, rest = line.decode(errors="surrogateescape").partition(" ")
                folder = Path(rest) if kind == "run" else folder
                if kind == "end":
                    return folder
            if not new:
                watched.remove(orders)  # the pipe closes only with the launcher; its handle says when
                if handle < 0:
                    return folder
            continue  # what it wrote before its death is read first
        if handle in ready or os.getppid() != launcher:
            return folder


def clean(token: str, temporary: str, folder: Path | None) -> None:
    """End what is left of the run, free its shared memory and its temporary files; leave a line about it."""
    ended = sweep(token, CLEAN_S)
    shutil.rmtree(temporary, ignore_errors=True)
    freed = _unlink_segments(folder) if folder is not None else 0
    unlink_unused()  # on a host of actors nobody knows the run, but the kernel knows that nobody uses them
    if folder is not None and folder.is_dir() and (ended or freed):
        (folder / "logs").mkdir(exist_ok=True)
        with (folder / "logs" / "janitor.log").open("a") as log:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"{when} after the launcher: {ended} processes ended, {freed} segments removed\n")


def _unlink_segments(folder: Path) -> int:
    try:
        run_id = str(json.loads((folder / "server.json").read_text())["run_id"])
    except (OSError, ValueError, KeyError, TypeError):  # the server had not begun
        return 0
    from async_rl.weights.segment import unlink_run  # its imports are larger than all the rest of this process

    return len(unlink_run(run_id))


def main(arguments: Iterable[str]) -> None:
    """The process."""
    launcher, token, temporary = arguments
    folder = await_end(int(launcher), sys.stdin.fileno())
    clean(token, temporary, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
