"""Shared memory between an engine's front end and its worker process: mappings there, a segment of our own here.

learner's /dev/shm segment ──┐
                             ├─ path ─► worker: Segments.map(path) ─► bytes
Staging (no name on disk)  ──┘
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from async_rl.errors import WeightsError

_KEEP = 4
"""Segments that stay mapped: versions alternate between few files, and first touch of a mapping is slow."""


class Segments:
    """Mappings of segment files by path, kept for reuse while the same file is behind the path.

    A plain ``mmap``: ``multiprocessing.shared_memory`` would unlink the learner's segment when this process ends.
    """

    def __init__(self) -> None:
        self._mapped: dict[str, tuple[tuple[int, int, int], mmap.mmap]] = {}

    def map(self, path: str, nbytes: int) -> memoryview:
        """Map the file and return its first ``nbytes``, faulted in; writes to them stay private.

        Raises:
            WeightsError: no such file, or it is shorter.
        """
        self._forget_replaced()
        if path not in self._mapped:
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise WeightsError(f"weight segment {path} cannot be opened: {error.strerror}") from None
            try:
                status = os.fstat(descriptor)
                if status.st_size < max(nbytes, 1):
                    raise WeightsError(f"weight segment {path} has {status.st_size} bytes, {nbytes} were published")
                view = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_COPY)
            finally:
                os.close(descriptor)
            # now, not while the engine is paused for a swap; MAP_POPULATE would copy the pages of a private mapping
            np.frombuffer(view, np.uint8)[:: mmap.PAGESIZE].max()
            self._mapped[path] = (_identity(status), view)
            while len(self._mapped) > _KEEP:
                del self._mapped[next(iter(self._mapped))]
        _, view = self._mapped[path]
        if len(view) < nbytes:
            raise WeightsError(f"weight segment {path} has {len(view)} bytes, {nbytes} were published")
        return memoryview(view)[:nbytes]

    def close(self) -> None:
        """Drop all mappings; memory goes back when nothing refers to it any more."""
        self._mapped.clear()

    def _forget_replaced(self) -> None:
        for path, (identity, _) in list(self._mapped.items()):
            try:
                same = _identity(os.stat(path)) == identity
            except OSError:
                same = False
            if not same:
                del self._mapped[path]


class Staging:
    """A segment of our own for bytes that came over the network.

    It has no name in the file system, only ``/proc/PID/fd/N`` while this process lives, so nothing can be left behind.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._view: mmap.mmap | None = None

    def write(self, data: memoryview) -> str:
        """Copy ``data`` in, over what was there, and return the path for the worker."""
        if self._view is None or len(self._view) != max(data.nbytes, 1):
            self.close()
            self._descriptor = os.memfd_create("async_rl-weights", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, max(data.nbytes, 1))
            self._view = mmap.mmap(self._descriptor, max(data.nbytes, 1))
        self._view[: data.nbytes] = data.cast("B")
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Give the memory back."""
        if self._view is not None:
            self._view.close()
            os.close(self._descriptor)
            self._view, self._descriptor = None, -1


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_size
