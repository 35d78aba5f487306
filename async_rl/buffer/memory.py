"""What the allocator does with memory that is free: the server needs it again for the next step.

Trajectories of a MiB come in frames of hundreds of KiB. By default the C library maps memory for each of them and gives
it back to the system as soon as it is free, so that each page is cleared and mapped anew: a fifth of what the server
does for such a trajectory.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""``M_TRIM_THRESHOLD``, ``M_MMAP_THRESHOLD`` and ``M_ARENA_MAX`` of mallopt(3)."""
KEPT_BYTES = 256 << 20
"""So much free memory at the end of a heap is not given back."""
_MAPPED_FROM = 32 << 20
"""Larger blocks are still mapped one by one; the most that mallopt takes."""
_SETTINGS = ((_TRIM_THRESHOLD, KEPT_BYTES), (_MMAP_THRESHOLD, _MAPPED_FROM), (_ARENA_MAX, 1))


def keep_free_memory() -> bool:
    """Reuse free memory from now on; False where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # one heap for all threads: the heaps of others come in parts of 64 MiB that are given back as soon as they are free
    taken = [mallopt(*setting) for setting in _SETTINGS]
    return all(taken)
