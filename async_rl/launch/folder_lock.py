"""One launcher at a time in a run folder: two would write the same files and call each other's segments their own.

    FolderLock(folder) ── flock of the folder itself ─► launcher ── inherits the descriptor ─► its janitor
                                                           └ killed: the janitor holds it until all is cleaned up

The kernel frees it with the last of the two, so a run that is resumed right after its launcher was killed waits until
nothing of the life before is left. It holds on this host, and wherever the file system shares its locks.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.launch.interrupts import Interrupts

WAIT_S = 10.0
"""A janitor has cleaned up within this time, unless the kernel holds a process fast."""
_LOOK_S = 0.1


class FolderLock:
    """Holds the folder while the block runs. Use as a context manager.

    Args:
        folder: the run folder, which is there.
        interrupts: end the wait for it.
        say: told that it is waited for.
    """

    def __init__(self, folder: Path, interrupts: Interrupts, say: Callable[[str], object]) -> None:
        self._folder, self._interrupts, self._say = folder, interrupts, say
        self._descriptor = -1

    def __enter__(self) -> int:
        """The descriptor, for the janitor.

        Raises:
            ConfigError: the folder is in use, or cannot be opened.
            AsyncRLError: interrupted while waiting.
        """
        try:
            self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"the run folder {self._folder} cannot be opened: {error.strerror}") from None
        try:
            self._take()
        except BaseException:
            os.close(self._descriptor)
            raise
        return self._descriptor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def _take(self) -> None:
        for turn in range(round(WAIT_S / _LOOK_S)):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if turn == 0:
                    self._say(f"{self._folder} is in use; waiting up to {WAIT_S:.0f} s for its end")
            except OSError as error:  # a file system without locks
                self._say(f"warning: {self._folder} cannot be locked ({error.strerror}): start no second run in it")
                return
            self._interrupts.wait(_LOOK_S)
            if self._interrupts.count:
                raise AsyncRLError("interrupted while waiting for the run folder")
        raise ConfigError(
            f"another async-rl works in {self._folder}, or still cleans up after a run there; end it first, or choose "
            "another folder"
        )
