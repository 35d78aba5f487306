"""Shared-memory segments: plain files in ``/dev/shm`` that the learner writes and every process on the host maps.

    learner ──Segment(run_id, slot)──► /dev/shm/async_rl-<run_id>-<slot> ◄──SegmentReader── actors, chunk server

Not ``multiprocessing.shared_memory``: its resource tracker unlinks segments that other processes still need. Here the
creator unlinks them, or the launcher after a crash (:func:`unlink_run`). A file is never resized once mapped, so no
reader can meet SIGBUS; another size means a new file, and old mappings keep the old bytes.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from async_rl.errors import WeightsError
from async_rl.weights.files import SHM, check_run_id
from async_rl.weights.manifest import Manifest

SLOTS = ("0", "1", "eval")
"""Versions alternate between the first two; those that are evaluated go to the third."""


def segment_path(run_id: str, slot: str) -> Path:
    """File of a slot.

    Raises:
        WeightsError: ``run_id`` or ``slot`` is not a plain name.
    """
    check_run_id(run_id)
    if slot not in SLOTS:
        raise WeightsError(f"slot {slot!r} of run {run_id}: slots are {SLOTS}")
    return SHM / f"async_rl-{run_id}-{slot}"


def unlink_run(run_id: str) -> list[Path]:
    """Remove all segments of a run and its copies (:mod:`async_rl.weights.copies`) and return what was removed.

    Mappings that are still in use keep their bytes.
    """
    removed = []
    for path in (*(segment_path(run_id, slot) for slot in SLOTS), *sorted(SHM.glob(f"async_rl-{run_id}@*"))):
        if os.path.lexists(path):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


class Segment:
    """The writer's end of one slot: allocated and faulted in once, then written again for each version.

    Args:
        run_id: the run that owns it.
        slot: one of :data:`SLOTS`.
        nbytes: size; a left-over file of the same size and owner is used again.

    Raises:
        WeightsError: ``/dev/shm`` is too small, or the file belongs to somebody else.
    """

    def __init__(self, run_id: str, slot: str, nbytes: int) -> None:
        if nbytes < 1:
            raise WeightsError(f"segment {slot} of run {run_id}: nothing to publish ({nbytes} bytes)")
        self.path = segment_path(run_id, slot)
        descriptor = _open_for_writing(self.path, nbytes)
        try:
            # allocate now: a page that tmpfs cannot give later would be a SIGBUS in the middle of a copy
            os.posix_fallocate(descriptor, 0, nbytes)
            mapped = mmap.mmap(
                descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE
            )
        except OSError as error:
            self.path.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise WeightsError(_no_space(self.path, nbytes)) from None
        finally:
            os.close(descriptor)
        self.data = memoryview(mapped)
        """The bytes [nbytes], writable."""

    def unlink(self) -> None:
        """Remove the file; mappings live on until their views are dropped."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Mapped:
    identity: tuple[int, int, int]
    data: memoryview


class SegmentReader:
    """The readers' end: maps the segments that manifests name, read-only, and keeps the mappings for later versions."""

    def __init__(self) -> None:
        self._mapped: dict[Path, _Mapped] = {}

    def open(self, manifest: Manifest) -> memoryview:
        """The segment's bytes [manifest.nbytes], read-only. They are not verified and may change under the reader.

        Raises:
            WeightsError: there is no such segment on this host, or it has another size.
        """
        path = Path(manifest.segment)
        if path not in (segment_path(manifest.run_id, slot) for slot in SLOTS):
            raise WeightsError(
                f"manifest of version {manifest.version} names {path}, which is no segment of {manifest.run_id}"
            )
        mapped = self._mapped.get(path)
        try:
            if mapped is None or mapped.identity != _identity(os.stat(path, follow_symlinks=False), manifest):
                mapped = self._mapped[path] = _map(path, manifest)
        except OSError as error:
            self._mapped.pop(path, None)
            raise WeightsError(
                f"cannot open segment {path} ({error.strerror}): its learner ended or is another host"
            ) from None
        return mapped.data

    def close(self) -> None:
        """Drop the mappings; memory goes back when the last view of it does."""
        self._mapped.clear()


def _map(path: Path, manifest: Manifest) -> _Mapped:
    """Map the file. One that is mapped takes no descriptor: a server whose last one is gone still serves it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        identity = _identity(os.fstat(descriptor), manifest)
        return _Mapped(identity, memoryview(mmap.mmap(descriptor, identity[2], mmap.MAP_SHARED, mmap.PROT_READ)))
    finally:
        os.close(descriptor)


def _identity(facts: os.stat_result, manifest: Manifest) -> tuple[int, int, int]:
    """Device, inode and size.

    Raises:
        WeightsError: it is not the file that the manifest means.
    """
    if not stat.S_ISREG(facts.st_mode) or facts.st_size != manifest.nbytes or facts.st_size < 1:
        raise WeightsError(f"segment {manifest.segment} has {facts.st_size} bytes, the manifest says {manifest.nbytes}")
    return facts.st_dev, facts.st_ino, facts.st_size


def _open_for_writing(path: Path, nbytes: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise WeightsError(f"cannot create segment {path}: {error.strerror}") from None
    facts = os.fstat(descriptor)
    if facts.st_uid != os.geteuid():
        os.close(descriptor)
        raise WeightsError(f"segment {path} belongs to user {facts.st_uid}: choose another run id, or remove it")
    if facts.st_size not in (0, nbytes):  # never resize what others may have mapped
        os.close(descriptor)
        path.unlink()
        descriptor = os.open(path, flags | os.O_EXCL, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _no_space(path: Path, nbytes: int) -> str:
    facts = os.statvfs(SHM)
    free = facts.f_bavail * facts.f_frsize
    return (
        f"{SHM} is too small for segment {path.name}: {nbytes:,} bytes are needed for each of {len(SLOTS)} slots, "
        f"{free:,} are free; enlarge it (mount -o remount,size=... {SHM}; docker run --shm-size) or remove "
        f"segments of dead runs ({SHM}/async_rl-*)"
    )
