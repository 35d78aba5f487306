"""Files in ``/dev/shm`` that processes of this host and user share, and the locks that say who uses them.

A lock (flock) belongs to an open file and ends with it, so that no death leaves one behind.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from pathlib import Path

from async_rl.errors import WeightsError

SHM = Path("/dev/shm")
_RUN_ID = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def check_run_id(run_id: str) -> None:
    """Raise :class:`WeightsError` unless it is a plain name, that can be part of a file's."""
    if not _RUN_ID.fullmatch(run_id):
        raise WeightsError(f"run id {run_id!r}: it has to be letters, digits, '_', '.', '-', at most 100")


def open_own(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Open a regular file of this user; ``None``: there is none.

    Raises:
        OSError: it is somebody else's, or no regular file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    facts = os.fstat(descriptor)
    if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} is not ours, but of user {facts.st_uid}")


def try_lock(descriptor: int, kind: int) -> bool:
    """Lock it now or not at all; ``kind`` is ``LOCK_SH`` or ``LOCK_EX``."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file still has this name."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def lock_own(path: Path, kind: int, flags: int = os.O_RDONLY) -> int | None:
    """A descriptor of the file under this name with a lock; ``None``: no such file, or it is locked otherwise.

    Raises:
        OSError: it is somebody else's, or no regular file.
    """
    descriptor = open_own(path, flags)
    if descriptor is None:
        return None
    if try_lock(descriptor, kind) and is_at(descriptor, path):
        return descriptor
    os.close(descriptor)
    return None
