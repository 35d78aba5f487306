"""The event log's files: records appended as they happen, on top of a base that is exchanged from time to time.

RUN/journal/   base-N/ (a Frozen, see journal.py) + events-N.bin + events-(N+1).bin while base-(N+1)/ is being written

append ─► one writev ─► events-N.bin       rotate ─► events-(N+1).bin; a thread writes base-(N+1), removes what is older
  └ inside ``with batch()``: ─► waits ─► one writev at its end, before anyone is answered for what is in it
read: the newest base ─► events-N.bin, events-(N+1).bin, ... in their order

events = magic | { body length u64 | number of frames u32 | check u32 | frame length u64 × frames | frames } × records

A process that dies leaves at most its last record incomplete, which nobody was answered for; it is cut off. The check
is a CRC-32 of the lengths and of the first frame (the header); arrays are not summed, which costs more than to write
them. Only the death of processes is provided for, not that of the machine: nothing is fsynced but bases. When writing
fails, as on a full disk, the log switches itself off, and what there is of it becomes unreadable: it would be stale.
"""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from async_rl.buffer.journal import Frozen, load, save
from async_rl.buffer.reserve import Reserve
from async_rl.errors import ConfigError
from async_rl.wire import Frame

LEAST_BYTES = 64 << 20
"""Events are not compacted below this size, nor below four times what the ledger holds."""
MOST_WAITING = 256 << 10
"""Bytes of a batch that wait at most: beyond, it is written in parts, while what is in them is still in the cache."""
_MOST_BUFFERS = 1024
"""Of one writev (IOV_MAX)."""
_MAGIC = b"async_rl events\n"
_HEAD = struct.Struct("<QII")
_U64 = struct.Struct("<Q")


class EventLog:
    """Owns the folder of one server. All methods are for one thread.

    Args:
        folder: ``RUN/journal``.
        number: of the base and the events that are there.
        events: descriptor of these events, to be appended to; -1: nothing is written until :meth:`rotate`.
    """

    def __init__(self, folder: Path, number: int = -1, events: int = -1) -> None:
        self._folder = folder
        self._number = number
        self._events = events
        self._reserve = Reserve(events)
        self._size = os.fstat(events).st_size if events >= 0 else 0
        self._waiting: list[Frame] = []
        """What the present batch appends."""
        self._waiting_bytes = 0
        self._in_batch = False
        self._writer = ThreadPoolExecutor(1, "journal")
        self._writing: Future[None] | None = None
        self._has_warned = False

    @classmethod
    def open(cls, folder: Path) -> EventLog:
        """For a run that begins, or goes on from a checkpoint: what an earlier server left there is removed.

        Raises:
            ConfigError: it cannot be removed.
        """
        try:
            if folder.exists():
                shutil.rmtree(folder)
        except OSError as error:
            raise ConfigError(f"the journal of an earlier run cannot be removed: {error}") from None
        return cls(folder)

    @property
    def is_on(self) -> bool:
        """Whether events are written."""
        return self._events >= 0

    def append(self, frames: Sequence[Frame]) -> None:
        """Write one record; it is in the kernel's hands on return, or at the end of a batch, unless the log is off."""
        if self._events < 0:
            return
        lengths = _lengths_of(len(frames)).pack(*map(len, frames))
        check = zlib.crc32(frames[0], zlib.crc32(lengths))
        body = len(lengths) + sum(map(len, frames))
        self._waiting.append(_HEAD.pack(body, len(frames), check) + lengths)
        self._waiting += frames
        self._waiting_bytes += _HEAD.size + body
        self._size += _HEAD.size + body
        if not self._in_batch or self._waiting_bytes > MOST_WAITING:
            self._write_waiting()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """What is appended meanwhile is written at the end: nobody may be answered for it before."""
        self._in_batch = True
        try:
            yield
        finally:
            self._in_batch = False
            self._write_waiting()

    def _write_waiting(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not waiting:
            return
        try:
            self._check_writer()
            self._reserve.reach(self._size)
            _write(self._events, waiting)
        except OSError as error:
            self._switch_off(error)

    def is_large(self, held_bytes: int) -> bool:
        """Whether it is time for :meth:`rotate`: replaying would take longer than reading a new base."""
        return self._size > max(LEAST_BYTES, 4 * held_bytes) and not self._is_writing

    def rotate(self, frozen: Frozen) -> None:
        """Go on from a new base, which a thread writes; also after the log was switched off.

        Does nothing while the base before is being written.
        """
        if self._is_writing:
            return
        self._write_waiting()  # what the new base has, too, counts before it is complete
        try:
            self._check_writer()
            self._begin_events()
        except OSError as error:
            self._switch_off(error)
            return
        self._writing = self._writer.submit(_write_base, self._folder, self._number, frozen)

    def flush(self) -> None:
        """Wait for the base that is being written."""
        self._writer.shutdown(wait=True)
        self._writer = ThreadPoolExecutor(1, "journal")
        try:
            self._check_writer()
        except OSError as error:
            self._switch_off(error)

    def close(self, *, remove: bool) -> None:
        """The server ends; ``remove``: so does the run, and nothing is to be recovered."""
        self._writer.shutdown(wait=True)
        self._write_waiting()
        if self._events >= 0:
            os.close(self._events)
            self._events = -1
        if remove:
            shutil.rmtree(self._folder, ignore_errors=True)  # on a dead disk: then nobody reads it either

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def _check_writer(self) -> None:
        """Raise what the thread met, once."""
        if self._writing is not None and self._writing.done():
            done, self._writing = self._writing, None
            done.result(timeout=0)
            self._has_warned = False

    def _begin_events(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        begun = self._folder / "events.tmp"
        events = os.open(begun, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write(events, [_MAGIC])
            begun.rename(_events_file(self._folder, self._number + 1))
        except OSError:
            os.close(events)
            raise
        if self._events >= 0:
            os.close(self._events)
        self._number, self._events, self._size = self._number + 1, events, len(_MAGIC)
        self._reserve = Reserve(events)

    def _switch_off(self, error: OSError) -> None:
        """A stale log would give a false ledger: without its events no base is read, nor with an empty file of them."""
        if not self._has_warned:
            print(
                f"warning: the journal in {self._folder} cannot be written ({error}); it is off until the next "
                "checkpoint: should this server die before, the run goes on from the newest one. Free the disk",
                flush=True,
            )
        self._has_warned = True
        self._waiting, self._waiting_bytes = [], 0
        if self._events >= 0:
            _empty(self._events)
            os.close(self._events)
            self._events = -1
        for path in self._folder.glob("events*"):
            _remove(path)
        self._writer.submit(_remove_bases, self._folder, self._number)


def read(folder: Path) -> tuple[Frozen, Iterator[list[Frame]]]:
    """The newest base and the records after it; a last one that is incomplete is cut off the file.

    Raises:
        ConfigError: there is none, or it is damaged; from the iterator, too.
    """
    bases = sorted(_numbers(folder, "base-*"))
    if not bases:
        raise ConfigError(f"there is no journal in {folder}")
    files = [_events_file(folder, n) for n in range(bases[-1], max([*_numbers(folder, "events-*"), bases[-1]]) + 1)]
    return load(_base_folder(folder, bases[-1])), _records(files)


def reopen(folder: Path) -> EventLog:
    """Append to what :func:`read` has read to its end.

    Raises:
        ConfigError: it cannot be written.
    """
    number = max(_numbers(folder, "events-*"))
    try:
        events = os.open(_events_file(folder, number), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"the journal cannot be written: {error}") from None
    return EventLog(folder, number, events)


def _records(files: Sequence[Path]) -> Iterator[list[Frame]]:
    for path in files:
        try:
            with open(path, "rb+") as file:
                size = os.fstat(file.fileno()).st_size
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise ConfigError(f"{path} is not a journal's file of events, or was given up on a full disk")
                while (start := file.tell()) < size:
                    head = file.read(_HEAD.size)
                    length = _HEAD.unpack(head)[0] if len(head) == _HEAD.size else size
                    is_whole = length <= size - file.tell()
                    if not is_whole and path != files[-1]:
                        raise ConfigError(f"{path} ends within a record, but is not the last one")
                    if not is_whole:
                        file.truncate(start)
                        return
                    yield _frames(path, start, head, file.read(length))
        except OSError as error:
            raise ConfigError(f"the journal cannot be read: {error}") from None


def _frames(path: Path, start: int, head: bytes, body: bytes) -> list[Frame]:
    _, count, check = _HEAD.unpack(head)
    end = count * _U64.size
    lengths = [n for (n,) in _U64.iter_unpack(body[:end])] if 0 < end <= len(body) else []
    if not lengths or end + sum(lengths) != len(body):
        raise ConfigError(f"{path} is damaged at byte {start}")
    frames: list[Frame] = []
    view = memoryview(body)
    for length in lengths:
        frames.append(view[end : end + length])
        end += length
    if zlib.crc32(frames[0], zlib.crc32(body[: count * _U64.size])) != check:
        raise ConfigError(f"{path} is damaged at byte {start}")
    return frames


def _write(descriptor: int, buffers: list[Frame]) -> None:
    """All of it, in one system call unless the buffers are very many or the kernel takes less."""
    at, end = 0, len(buffers)
    while at < end:
        written = os.writev(descriptor, buffers[at : at + _MOST_BUFFERS])
        while at < end and written >= len(buffers[at]):
            written -= len(buffers[at])
            at += 1
        if written:
            buffers[at] = memoryview(buffers[at])[written:]


@lru_cache(maxsize=256)
def _lengths_of(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


def _write_base(folder: Path, number: int, frozen: Frozen) -> None:
    """In the writer's thread: the base appears complete or not at all; what it replaces goes."""
    begun = folder / "base.tmp"
    shutil.rmtree(begun, ignore_errors=True)  # an earlier one that was not completed
    save(frozen, begun)
    begun.rename(_base_folder(folder, number))
    _remove_bases(folder, number - 1)
    for n in _numbers(folder, "events-*"):
        if n < number:
            _remove(_events_file(folder, n))


def _remove_bases(folder: Path, newest: int) -> None:
    for n in _numbers(folder, "base-*"):
        if n <= newest:
            shutil.rmtree(_base_folder(folder, n), ignore_errors=True)  # a rest of it is older than the newest base


def _empty(descriptor: int) -> None:
    """In case the file cannot be removed; neither is possible on a disk that has become read-only."""
    try:
        os.ftruncate(descriptor, 0)
    except OSError as error:
        print(f"warning: the journal cannot be emptied ({error}): do not recover from it", flush=True)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        print(f"warning: {path} cannot be removed: {error}", flush=True)


def _numbers(folder: Path, pattern: str) -> list[int]:
    """The numbers of the bases or files of events there."""
    return [int(p.stem.partition("-")[2]) for p in folder.glob(pattern)]


def _base_folder(folder: Path, number: int) -> Path:
    return folder / f"base-{number}"


def _events_file(folder: Path, number: int) -> Path:
    return folder / f"events-{number}.bin"
