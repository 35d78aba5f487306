"""Copies of weights that no living process uses: found by their names, told by their locks, removed.

Whoever cleans up needs no numbers and no sockets: the janitor is one of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from async_rl.weights.files import SHM, lock_own
from async_rl.weights.turn import remove_if_free

TURN = "@turn"
"""End of the name of a run's FIFO."""


def copy_files(run_id: str = "*") -> list[Path]:
    """All files of the copies of a run, or of all runs, whoever owns them."""
    return sorted(SHM.glob(f"async_rl-{run_id}@*"))


def unlink_unused(run_id: str = "*") -> list[Path]:
    """Remove this user's copies that no living process uses, of one run or of all; those that were removed."""
    removed = []
    for path in copy_files(run_id):
        with contextlib.suppress(OSError):  # somebody else's, or no file of ours at all: it stays
            if path.name.endswith(TURN):
                if remove_if_free(path):
                    removed.append(path)
                continue
            descriptor = lock_own(path, fcntl.LOCK_EX)
            if descriptor is not None:
                path.unlink(missing_ok=True)
                os.close(descriptor)
                removed.append(path)
    return removed
