"""Space on the disk ahead of the end of a file: a third of what it costs to append a MiB is to find space for it."""

from __future__ import annotations

import ctypes
import sys

_KEEP_SIZE = 1
"""``FALLOC_FL_KEEP_SIZE``: the file ends where it ended."""
AHEAD_BYTES = 32 << 20
_FROM_BYTES = 4 << 20
"""Files that stay smaller need none."""
_LIBC = ctypes.CDLL(None)


class Reserve:
    """Of one file that is appended to.

    Args:
        descriptor: of the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._until = _FROM_BYTES

    def reach(self, size: int) -> None:
        """The file is to have ``size`` bytes. Where space cannot be reserved, appending finds it, or fails, itself."""
        if size > self._until and sys.platform == "linux":
            self._until = size + AHEAD_BYTES
            _LIBC.fallocate(self._descriptor, _KEEP_SIZE, ctypes.c_long(size), ctypes.c_long(AHEAD_BYTES))
