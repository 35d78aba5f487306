"""Versions that came over the network, one copy for all receivers of a host: files of shared memory.

    /dev/shm/async_rl-<run_id>@<epoch>.<version>   whole       shared lock: somebody uses it
                            @part-<random>         being filled, or left by who died      exclusive lock: by somebody
                            @turn                  see :mod:`async_rl.weights.turn`

    part ──rename──► whole ──nobody uses it any more──► part of a later version: its pages are there already

What is whole never changes. No run id has an "@".
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from async_rl.weights.files import SHM, check_run_id, is_at, lock_own, try_lock
from async_rl.weights.leftovers import TURN, copy_files, unlink_unused
from async_rl.weights.manifest import Manifest

_WHOLE = re.compile(r"@(\d+)\.(\d+)$")
_TRIES = 100
_ALLOCATE_BYTES = 1 << 30


class Copy:
    """A file's bytes, and the lock that keeps others from writing over them until :meth:`release`."""

    def __init__(self, path: Path, descriptor: int, data: memoryview) -> None:
        self.path = path
        self.data = data
        """The bytes; writable only while it is filled."""
        self.descriptor = descriptor

    def release(self) -> None:
        """They may be written over from now on. A second call does nothing."""
        if self.descriptor >= 0:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # a forked child may have the descriptor, too
            os.close(self.descriptor)
            self.descriptor = -1


class Copies:
    """The copies of one run on this host. Belongs to one thread.

    Args:
        run_id: of the run.

    Raises:
        WeightsError: ``run_id`` is not a plain name.
    """

    def __init__(self, run_id: str) -> None:
        check_run_id(run_id)
        self._run_id = run_id
        self._mapped: dict[tuple[tuple[int, int], bool], memoryview] = {}
        """By inode, and whether it can be written: the first touch of a mapping is slower than all that follows."""

    @property
    def turn(self) -> Path:
        """FIFO of the run's turn."""
        return SHM / f"async_rl-{self._run_id}{TURN}"

    def find(self, manifest: Manifest) -> Copy | None:
        """The copy of a version, not verified; ``None``: there is none.

        Raises:
            OSError: what is there belongs to somebody else, or cannot be mapped.
        """
        path = self._path(manifest)
        descriptor = lock_own(path, fcntl.LOCK_SH)
        if descriptor is None:
            return None
        if os.fstat(descriptor).st_size != manifest.nbytes:
            os.close(descriptor)
            return None
        return self._copy(path, descriptor, writable=False)

    def begin(self, manifest: Manifest, pulse: Callable[[], None]) -> Copy:
        """A writable copy of the right size, that nobody finds yet: one that is no longer used, or a new one.

        Args:
            manifest: of the version that will be written.
            pulse: called now and then.

        Raises:
            OSError: ``/dev/shm`` is full, or cannot be used.
        """
        for path, descriptor in self._unused():
            if os.fstat(descriptor).st_size == manifest.nbytes:
                part = self._part()
                os.rename(path, part)
                return self._copy(part, descriptor, writable=True)
            path.unlink(missing_ok=True)
            os.close(descriptor)
        part, descriptor = self._create()
        try:
            # allocate now: a page that tmpfs cannot give later would be a SIGBUS in the middle of a copy
            for first in range(0, manifest.nbytes, _ALLOCATE_BYTES):
                os.posix_fallocate(descriptor, first, min(_ALLOCATE_BYTES, manifest.nbytes - first))
                pulse()
        except OSError:
            part.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return self._copy(part, descriptor, writable=True)

    def finish(self, copy: Copy, manifest: Manifest) -> Copy:
        """Let all find what :meth:`begin` gave and the caller filled and verified; it is this caller's, too.

        Of what nobody uses, one file stays for the next version.
        """
        path = self._path(manifest)
        with contextlib.suppress(FileNotFoundError):  # the run is being cleaned up: our mapping holds
            os.rename(copy.path, path)
        try_lock(copy.descriptor, fcntl.LOCK_SH)
        for index, (unused, descriptor) in enumerate(self._unused()):
            if index:
                unused.unlink(missing_ok=True)
            os.close(descriptor)
        return Copy(path, copy.descriptor, copy.data.toreadonly())

    def discard(self, copy: Copy) -> None:
        """Nobody is to find it any more."""
        if is_at(copy.descriptor, copy.path):
            copy.path.unlink(missing_ok=True)
        copy.release()

    def close(self) -> None:
        """Drop the mappings, and the files that nobody uses."""
        self._mapped.clear()
        unlink_unused(self._run_id)

    def _path(self, manifest: Manifest) -> Path:
        return SHM / f"async_rl-{self._run_id}@{manifest.epoch}.{manifest.version}"

    def _part(self) -> Path:
        return SHM / f"async_rl-{self._run_id}@part-{secrets.token_hex(8)}"

    def _create(self) -> tuple[Path, int]:
        for _ in range(_TRIES):  # who cleans up may meet it before it is locked
            part = self._part()
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if try_lock(descriptor, fcntl.LOCK_EX) and is_at(descriptor, part):
                return part, descriptor
            os.close(descriptor)
        raise FileNotFoundError(f"{part} vanishes each time that it is made")

    def _unused(self) -> Iterator[tuple[Path, int]]:
        """Files, locked for us, that nobody uses; the newest version is not among them: others are about to want it."""
        paths = copy_files(self._run_id)
        newest = max((path for path in paths if _WHOLE.search(path.name)), key=_order, default=None)
        for path in paths:
            if path in (newest, self.turn):
                continue
            try:
                descriptor = lock_own(path, fcntl.LOCK_EX, os.O_RDWR)
            except OSError:  # somebody else's
                continue
            if descriptor is not None:
                yield path, descriptor

    def _copy(self, path: Path, descriptor: int, *, writable: bool) -> Copy:
        facts = os.fstat(descriptor)
        inode = (facts.st_dev, facts.st_ino)
        data = self._mapped.get((inode, True))
        if data is None and not writable:
            data = self._mapped.get((inode, False))
        if data is None:
            self._forget()
            protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
            try:
                data = memoryview(mmap.mmap(descriptor, facts.st_size, mmap.MAP_SHARED, protection))
            except OSError:
                os.close(descriptor)
                raise
            self._mapped[inode, writable] = data
        return Copy(path, descriptor, data if writable else data.toreadonly())

    def _forget(self) -> None:
        """Drop the mappings of files that are no more."""
        alive = set()
        for path in copy_files(self._run_id):
            with contextlib.suppress(FileNotFoundError):
                facts = os.stat(path, follow_symlinks=False)
                alive.add((facts.st_dev, facts.st_ino))
        self._mapped = {key: data for key, data in self._mapped.items() if key[0] in alive}


def _order(path: Path) -> tuple[int, int]:
    match = _WHOLE.search(path.name)
    assert match is not None
    return int(match[1]), int(match[2])
