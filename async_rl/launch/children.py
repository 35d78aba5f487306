"""A child process of the launcher: own session, own log, dies with its parent, reaped with its CPU time.

Child.start ─► alive ─► poll() ─► exit code + cpu_s          terminate(): SIGTERM, then SIGKILL at the deadline
descendants of every child come to the launcher (sub-reaper) and are ended by ``end_descendants``
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from async_rl.errors import AsyncRLError
from async_rl.launch.torchrun import RankFailures, is_traceback, killed_rank, own_sentence, without_report
from async_rl.process import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_TAIL_BYTES = 64 << 10
_LAST_LINES = 8
"""Other ranks, and threads that are still ending, may add a few."""


@dataclass(slots=True)
class Child:
    """One process that the launcher started."""

    name: str
    command: tuple[str, ...]
    log: Path
    process: subprocess.Popen[bytes]
    exit_code: int | None = None
    """``None`` while it runs; negative for a signal, as in :mod:`subprocess`."""
    cpu_s: float = 0.0
    """User and system seconds of it and of its waited-for children, known after the end."""
    started: float = field(default_factory=time.monotonic)
    log_start: int = 0
    """Size of the log before: what stands there was written by earlier lives."""

    @classmethod
    def start(cls, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> Child:
        """Start a process that writes to ``log`` (appended) and that the kernel kills when the launcher ends.

        Call it from the main thread: the kernel watches the thread that forks.
        """
        parent = os.getpid()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            log_start = sink.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),
            )
        return cls(name, tuple(command), log, process, log_start=log_start)

    @property
    def pid(self) -> int:
        """Process id, which is its session id too."""
        return self.process.pid

    def poll(self) -> int | None:
        """Reap it if it has ended; the exit code, or ``None`` while it runs."""
        if self.exit_code is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.cpu_s = usage.ru_utime + usage.ru_stime
                self.exit_code = self.process.returncode = os.waitstatus_to_exitcode(status)
        return self.exit_code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process group; nothing when it has ended."""
        if self.poll() is None:
            os.killpg(self.pid, number)

    def tail(self, lines: int = 15) -> list[str]:
        """The last lines that it wrote to its log."""
        return tail(self.log, lines, self.log_start)

    def cause(self) -> str | None:
        """What it said itself about why it ended; ``None`` if it was killed, which it cannot have known."""
        return cause(self.log, self.log_start) if (self.poll() or 0) > 0 else None

    def sentence(self) -> str | None:
        """The last sentence of our own in its log, see :func:`sentence`."""
        return sentence(self.log, self.log_start)

    def killed_rank(self) -> str | None:
        """Which rank of a learner group was killed last, see :func:`async_rl.launch.torchrun.killed_rank`."""
        return killed_rank(tail(self.log, 400, self.log_start))

    def rank_failures(self) -> RankFailures:
        """Reader of what torchrun says of its ranks in this life."""
        return RankFailures(self.log, self.log_start)

    def describe_end(self) -> str:
        """How it ended, as the end of a sentence."""
        code = self.poll()
        if code is None:
            return "still runs"
        if code < 0:
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"was ended by {signal.Signals(-code).name}{hint}"
        return f"ended with exit code {code}"


def tail(log: Path, lines: int, start: int = 0) -> list[str]:
    """The last lines of a text file behind byte ``start``; what torchrun adds about a rank's end is left out."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    return list(deque(without_report(text.splitlines()), maxlen=lines))


def sentence(log: Path, start: int = 0) -> str | None:
    """The sentence in which one of our processes said why it ends; ``None`` without one.

    It is the last that it writes; what stands further above was a remark, after which it went on.
    """
    last = tail(log, _LAST_LINES, start)
    said = [said for line in last if (said := own_sentence(line))]
    return said[-1] if said and not any(is_traceback(line) for line in last) else None


def cause(log: Path, start: int = 0) -> str | None:
    """The sentence in which one of our processes said why it ends, else the last exception line, else ``None``."""
    pattern = r"(?:\[.*?\]:)?(\w[\w.]*(?:Error|Exception)\b.*)"
    recent = tail(log, 400, start)
    errors = [match[1] for line in recent if (match := re.match(pattern, line)) and "ChildFailedError" not in line]
    return sentence(log, start) or (errors[-1] if errors else None)


def wait_all(children: Iterable[Child], timeout_s: float, on_turn: Callable[[], bool] = lambda: True) -> list[Child]:
    """Wait until all have ended, the time is up, or ``on_turn`` (called some times a second) returns false.

    Returns:
        Those that still run.
    """
    deadline = time.monotonic() + timeout_s
    alive = [child for child in children if child.poll() is None]
    while alive and time.monotonic() < deadline and on_turn():
        _wait_for_exit(alive[0].pid, min(0.1, max(0.0, deadline - time.monotonic())))
        alive = [child for child in alive if child.poll() is None]
    return alive


def ends_in_time(
    child: Child, timeout_s: float, what: str, interrupted: Callable[[], bool], grace_s: float = 0.0
) -> bool:
    """Wait for a child that tries or builds something before the run; it has ended when this returns, however.

    Args:
        child: the process.
        timeout_s: it may take.
        what: it does, as in "interrupted while ``what``".
        interrupted: ends it once it is true.
        grace_s: between the request to end and its death.

    Raises:
        AsyncRLError: ``interrupted`` became true.
    """
    try:
        late = wait_all([child], timeout_s, lambda: not interrupted())
    finally:
        end_all([child], grace_s)
    if interrupted():
        raise AsyncRLError(f"interrupted while {what}")
    return not late


def end_all(children: Sequence[Child], grace_s: float) -> None:
    """SIGTERM to every child that runs, then SIGKILL to those that are left after ``grace_s``."""
    for child in children:
        child.signal(signal.SIGTERM)
    for child in wait_all(children, grace_s):
        child.signal(signal.SIGKILL)
    wait_all(children, 5.0)


def become_subreaper() -> None:
    """Orphaned descendants come to this process instead of to init, so that it can find and end them (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(spare: Collection[int] = ()) -> int:
    """SIGKILL every descendant of this process and reap those that came to it; returns how many there were.

    Args:
        spare: process ids that live on.
    """
    seen: set[int] = set()
    deadline = time.monotonic() + 5.0
    while (alive := set(descendants(os.getpid())).difference(spare)) and time.monotonic() < deadline:
        for pid in alive:
            seen.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for pid in alive:
            _wait_for_exit(pid, 0.5)
            _reap(pid)
    return len(seen)


def descendants(root: int) -> list[int]:
    """Process ids below ``root``, from /proc."""
    parent_of: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it ended between the listing and the read
            parent_of[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found: list[int] = []
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parent_of.items() if parent in frontier}
        found.extend(frontier)
    return found


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # not ours, its own parent reaps it


def _wait_for_exit(pid: int, timeout_s: float) -> None:
    """Block until the process ends or the time is up, without reaping it."""
    import select

    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([handle], [], [], timeout_s)
    finally:
        os.close(handle)
