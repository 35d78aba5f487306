"""Shared memory between an engine's front end and its worker process: mappings there, a segment of our own here.

learner's /dev/shm segment ──┐
                             ├─ path ─► worker: Segments.map(path) ─► bytes
Staging (no name on disk)  ──┘
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np

from async_rl.errors import WeightsError

_KEEP = 4
"""Segments that stay mapped: versions alternate between few files, and first touch of a mapping is slow."""


@dataclass(frozen=True, slots=True)
class _Mapped:
    path: str
    descriptor: int
    view: mmap.mmap


class Segments:
    """Mappings of segment files, kept for reuse as long as there is the file, under whatever name.

    A plain ``mmap``: ``multiprocessing.shared_memory`` would unlink the learner's segment when this process ends.
    """

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int, int], _Mapped] = {}

    def map(self, path: str, nbytes: int) -> memoryview:
        """Map the file and return its first ``nbytes``, faulted in; writes to them stay private.

        Raises:
            WeightsError: no such file, or it is shorter.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightsError(f"weight segment {path} cannot be opened: {error.strerror}") from None
        status = os.fstat(descriptor)
        identity = _identity(status)
        if identity in self._mapped or status.st_size < max(nbytes, 1):
            os.close(descriptor)
        else:
            self._forget_removed()
            view = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_COPY)
            # now, not while the engine is paused for a swap; MAP_POPULATE would copy the pages of a private mapping
            np.frombuffer(view, np.uint8)[:: mmap.PAGESIZE].max()
            self._mapped[identity] = _Mapped(path, descriptor, view)
            while len(self._mapped) > _KEEP:
                self._drop(next(iter(self._mapped)))
        if status.st_size < max(nbytes, 1):
            raise WeightsError(f"weight segment {path} has {status.st_size} bytes, {nbytes} were published")
        return memoryview(self._mapped[identity].view)[:nbytes]

    def close(self) -> None:
        """Drop all mappings; memory goes back when nothing refers to it any more."""
        for identity in list(self._mapped):
            self._drop(identity)

    def _forget_removed(self) -> None:
        """Drop files that have no name any more, and are not at their path (which a :class:`Staging` is)."""
        for identity, mapped in list(self._mapped.items()):
            if os.fstat(mapped.descriptor).st_nlink:
                continue
            try:
                same = _identity(os.stat(mapped.path)) == identity
            except OSError:
                same = False
            if not same:
                self._drop(identity)

    def _drop(self, identity: tuple[int, int, int]) -> None:
        os.close(self._mapped.pop(identity).descriptor)


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
