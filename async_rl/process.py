"""Small facts and duties of a process: which host it is on, what it has used, and that it dies with its parent."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from async_rl.errors import AsyncRLError
from async_rl.output import outlive_full_disk

_PR_SET_PDEATHSIG = 1
_GARBAGE = 10_000
"""Objects between two searches for cycles: the thousands that come and go with the groups have none."""


def host_id() -> str:
    """Identity of this host and its shared memory: two processes with the same one can map the same segment.

    The device number of ``/dev/shm`` tells containers on one kernel apart.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        device = os.stat("/dev/shm").st_dev
    except OSError:
        boot, device = "unknown", 0
    return f"{socket.gethostname()}/{boot}/{device}"


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends, so that no orphan is left (Linux).

    Args:
        parent_pid: the parent seen before a fork or exec; if it is gone already, exit at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def cpu_seconds() -> float:
    """User and system CPU seconds of this process and of its waited-for children."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def rss_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def spare_what_is_loaded() -> None:
    """Leave all that exists now out of Python's later searches for cycles: torch alone is half a million objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE)


def leave(exit_code: int = 0) -> NoReturn:
    """End at once, for a process that has closed everything it had, or whose main thread cannot be reached.

    Threads of a collective backend may still be ending when the interpreter tears down native objects; once in many
    runs that aborts the process, and a run that has completed would be called failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def run_guarded(main: Callable[[], None]) -> None:
    """Run the body of a process: our own errors become one sentence on stderr and their exit code, no traceback.

    A full disk below its log does not end it.
    """
    outlive_full_disk()
    try:
        main()
    except AsyncRLError as error:
        print(f"async-rl: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # who was asked to end has nothing to explain
        sys.exit(128 + signal.SIGINT)
