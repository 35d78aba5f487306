"""What child processes that run the user's code may use: memory, processor time, files, network, secrets.

    parent: Sandbox.environment ─► child: Sandbox.enter ─► before each call: grant_cpu ─► user's code
                                                                limit_hit(its error) │ fatal_limit(exit code) ─► counted

It protects a run from code that goes wrong: leaks, endless loops, downloads. It is no prison: the code runs as the same
user and can read what that user can read. Run code that you do not trust in a container of its own.

    python -m async_rl.sandbox         prints why the network cannot be cut off here; nothing when it can
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import os
import re
import resource
import signal
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # a child starts sooner without
    from async_rl.config import TaskConfig

Limit = Literal["memory_limit", "cpu_limit", "file_limit", "no_network"]
"""Slugs under which a call that hit a limit is counted."""

DEFAULT_MEMORY = 4 << 30
START_CPU_S = 600.0
"""CPU time of a child's start: the import of the user's module."""
_SECRET_NAMES = re.compile(r"SECRET|(^|_)(KEY|APIKEY|TOKEN|PASSWORD|PASSWD|CREDENTIALS)$", re.IGNORECASE)
_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x41
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ECONNREFUSED)
_OUT_OF_MEMORY = "allocate memory"
"""How torch and libc say it, in exceptions that are no :class:`MemoryError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """The limits of one child process; what it starts itself inherits them, each process with its own count."""

    memory_bytes: int = DEFAULT_MEMORY
    """Private writable memory (RLIMIT_DATA: unlike the address space, which CUDA and JIT compilers reserve by the
    terabyte), and the longest file (RLIMIT_FSIZE: files in /dev/shm are memory, too)."""
    network: bool = False
    """Whether it keeps the network; else it has a loopback interface of its own, where the system allows that."""
    keep_env: tuple[str, ...] = ()
    """Variables that it gets although their names say that they are secrets."""
    cpu_s: float = START_CPU_S
    """CPU seconds of one call, all threads together."""

    @classmethod
    def of(cls, task: TaskConfig) -> Sandbox:
        """As the settings say.

        A call that ends within ``timeout_s`` cannot use more CPU time than it gets here, whatever its threads do: this
        limit is for what has escaped the parent's clock, such as a process in a session of its own.
        """
        processors = len(os.sched_getaffinity(0))
        return cls(
            memory_bytes=task.memory_bytes,
            network=task.network,
            keep_env=tuple(task.keep_env),
            cpu_s=task.timeout_s * processors,
        )

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """``base`` without secrets."""
        return {k: v for k, v in base.items() if k in self.keep_env or not _SECRET_NAMES.search(k)}

    def enter(self) -> str:
        """Limit this process, for good. Call it before there are threads.

        Returns:
            Why the network could not be cut off; empty if it was, or is allowed.

        Raises:
            OSError: the system takes away the network but gives no working substitute.
        """
        _lower(resource.RLIMIT_DATA, self.memory_bytes)
        _lower(resource.RLIMIT_FSIZE, self.memory_bytes)
        _lower(resource.RLIMIT_CORE, 0)
        self._grant(START_CPU_S)
        return "" if self.network else cut_network()

    def grant_cpu(self) -> None:
        """Begin a call: ``cpu_s`` from now on; then the kernel sends SIGXCPU."""
        self._grant(self.cpu_s)

    def _grant(self, seconds: float) -> None:
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        until = math.ceil(time.process_time() + seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (until if hard == resource.RLIM_INFINITY else min(until, hard), hard))

    def fatal_limit(self, exit_code: int | None) -> tuple[Limit, str] | None:
        """The limit of which a process died, and a sentence; ``None`` if it was something else."""
        if exit_code != -signal.SIGXCPU:
            return None
        return (
            "cpu_limit",
            f"used more than {self.cpu_s:g} s of CPU time in one call (from task.timeout_s) and was killed",
        )


def limit_hit(error: BaseException) -> tuple[Limit, str] | None:
    """The limit of this process that an exception of the user's code tells of, and a sentence; ``None`` if it is none.

    Looks through the causes, too: libraries wrap what the system says.
    """
    for cause in _chain(error):
        memory, file = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE))
        number = cause.errno if isinstance(cause, OSError) else None
        scarce = isinstance(cause, MemoryError) or number == errno.ENOMEM or _OUT_OF_MEMORY in str(cause)
        if scarce and memory != resource.RLIM_INFINITY:
            return "memory_limit", f"it needs more memory than task.memory_bytes = {memory} allows"
        if number == errno.EFBIG and file != resource.RLIM_INFINITY:
            return "file_limit", f"it wrote a file longer than task.memory_bytes = {file} allows"
        if (number in _UNREACHABLE or isinstance(cause, socket.gaierror)) and not _has_network():
            return "no_network", "it has no network, this host's own included; task.network = true allows it"
    return None


def cut_network() -> str:
    """Leave the network for a new one with nothing but a loopback interface (Linux namespaces). No threads may run.

    Returns:
        Why that is impossible here, nothing being changed then; empty when it is done.

    Raises:
        OSError: see :meth:`Sandbox.enter`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):  # of root; others need a user namespace around it
        user, group = os.geteuid(), os.getegid()
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
            return f"unshare: {os.strerror(ctypes.get_errno())}"
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))
    return ""


def _has_network() -> bool:
    return any(name != "lo" for _, name in socket.if_nameindex())


def _lower(which: int, most: int) -> None:
    """Lower a limit that cannot be raised again."""
    hard = resource.getrlimit(which)[1]
    value = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (value, value))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that led to it, each once."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


if __name__ == "__main__":
    print(cut_network())
