"""Whose turn it is on this host: one process at a time, freed by the kernel when its holder ends in whatever way.

    take ──lock on a FIFO──► holder ──pulse──► modification time         the holder keeps the FIFO open for writing:
      │ somebody else's                                                   its last descriptor gone wakes all who wait
      └─► wait ──► hang-up: try again │ no pulse for a while: unlink it, and the next ones queue at a new file

A holder that was replaced since it did not move may wake up later: what it does must do no harm then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
from pathlib import Path

from async_rl.weights.files import is_at, try_lock

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 100


class Turn:
    """One attempt to have the turn; close it in any case.

    Args:
        path: of the FIFO, made if it is missing.

    Raises:
        OSError: it cannot be made or opened, or is somebody else's.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = _open(path)
        self._writer = -1

    def take(self) -> bool:
        """Have the turn from now on, if nobody has it."""
        writer = os.open(f"/proc/self/fd/{self._descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # the lock is that of the writer's end, so that the kernel frees it first and then wakes who waits
        if not try_lock(writer, fcntl.LOCK_EX) or not is_at(writer, self._path):
            os.close(writer)
            return False
        self._writer = writer
        self.pulse()
        return True

    def pulse(self) -> None:
        """The holder says that it moves."""
        os.utime(self._descriptor)

    def wait(self, stop: int, patience_s: float) -> bool:
        """Until it is worth another attempt; False: ``stop`` became readable.

        Args:
            stop: descriptor.
            patience_s: a holder that is silent for so long loses its turn.
        """
        poller = select.poll()
        poller.register(self._descriptor, 0)  # a hang-up is always reported
        poller.register(stop, select.POLLIN)
        seen = os.fstat(self._descriptor).st_mtime_ns
        while is_at(self._descriptor, self._path):
            ready = dict(poller.poll(max(1, round(patience_s * 1e3))))
            if stop in ready:
                return False
            if self._descriptor in ready:
                return True
            pulse = os.fstat(self._descriptor).st_mtime_ns
            if pulse == seen:
                if is_at(self._descriptor, self._path):
                    self._path.unlink(missing_ok=True)
                return True
            seen = pulse
        return True

    def close(self) -> None:
        """Give the turn back, if we have it."""
        if self._writer >= 0:
            fcntl.flock(self._writer, fcntl.LOCK_UN)  # a forked child may have the descriptor, too
            os.close(self._writer)
        os.close(self._descriptor)


def remove_if_free(path: Path) -> bool:
    """Remove the FIFO unless somebody has the turn."""
    turn = Turn(path)
    try:
        free = turn.take()
        if free:
            path.unlink(missing_ok=True)
        return free
    finally:
        turn.close()


def _open(path: Path) -> int:
    for _ in range(_TRIES):  # between the two calls somebody may remove it
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        try:
            descriptor = os.open(path, _FLAGS)
        except FileNotFoundError:
            continue
        facts = os.fstat(descriptor)
        if stat.S_ISFIFO(facts.st_mode) and facts.st_uid == os.geteuid():
            return descriptor
        os.close(descriptor)
        raise PermissionError(f"{path} is not ours, but of user {facts.st_uid}")
    raise FileNotFoundError(f"{path} vanishes each time that it is made")
