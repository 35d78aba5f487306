"""The weight receiver: prepares versions in its own thread while the actor goes on generating.

    actor thread                     prepare thread
    fetch(manifest) ──newest wins──► shm: map the segment, verify each chunk in place
    fileno() readable ◄──────────── zmq: one receiver of the host pulls chunks into a copy, all map and verify it
    ready() ──► Prepared ──► engine.load_weights ──► live

A transfer that has begun is finished although a newer version is announced meanwhile: aborting it would starve an actor
whose transfers take longer than a step. A slot that was overwritten meanwhile is a failure with reason ``superseded``.
A host that has no room for the copy in its shared memory is told once, and each receiver pulls into its own buffers.
After any failure the newest version is tried again, at once if a newer one was announced, else after a second.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from async_rl.curve import ClientKeys
from async_rl.errors import DeadlineError, WeightsError
from async_rl.process import host_id
from async_rl.weights.copies import Copy
from async_rl.weights.manifest import Manifest
from async_rl.weights.puller import Puller, TransferError
from async_rl.weights.segment import SegmentReader
from async_rl.weights.share import HostShare

_RETRY_S = 1.0
_IDLE_S = 60.0
_CLOSE_S = 10.0
_PATIENCE = 2.0
"""Times ``stall_s``: a puller that is alive shows it once in ``stall_s``, whether chunks come or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A version whose bytes were verified against its manifest."""

    manifest: Manifest
    """Names the segment of this host, if ``data`` is one."""
    data: memoryview
    """The flat bytes [manifest.nbytes]: read-only shared memory of the learner, that it may write over, or a copy or a
    buffer that stays valid until :meth:`Receiver.ready` hands out the next version."""
    transfer_s: float
    """From the start of the transfer until the last chunk was verified."""
    path: Literal["shm", "zmq"]
    copy: Copy | None = None
    """What holds ``data``, if it is shared by the receivers of this host."""

    def release(self) -> None:
        """Nobody reads ``data`` any more."""
        if self.copy is not None:
            self.copy.release()


class Receiver:
    """One per actor process. All methods belong to the actor's thread.

    Args:
        path: ``auto`` takes shared memory if the segment is on this host, else ZeroMQ.
        weights_address: gives the chunk server's address; asked for each transfer.
        run_id: versions of other runs are refused.
        stall_s: longest time without a chunk before a transfer is taken up anew.
        keys: of a server that lets in only those whom it knows.
    """

    def __init__(
        self,
        path: Literal["auto", "shm", "zmq"],
        weights_address: Callable[[], str],
        run_id: str,
        stall_s: float = 5.0,
        keys: ClientKeys | None = None,
    ) -> None:
        self._path = path
        self._run_id = run_id
        self._host = host_id()
        self._changed = threading.Condition()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._weights_address = weights_address
        self._puller = Puller(weights_address(), self._stop, stall_s, keys)
        self._reader = SegmentReader()
        self._share = HostShare(run_id, self._stop, _PATIENCE * stall_s)
        self._told = False
        self._buffers: list[memoryview] = []
        self._newest = (-1, -1)
        """Epoch and version."""
        self._wanted: Manifest | None = None
        self._retry_at = 0.0
        self._working: Manifest | None = None
        self._ready: Prepared | None = None
        self._lent: Prepared | None = None
        self._closed = False
        self._crash: Exception | None = None
        self.failures: Counter[str] = Counter()
        """Failed transfers by reason."""
        self.last_failure = ""
        """The last one as a sentence."""
        self._thread = threading.Thread(target=self._run, name="weight-receiver", daemon=True)
        self._thread.start()

    def fetch(self, manifest: Manifest) -> None:
        """Prepare this version next; one that is older than any asked for before is dropped. Never blocks.

        A version of a later epoch is newer whatever its number; what earlier epochs made is not handed out any more.

        Raises:
            WeightsError: the manifest is of another run.
        """
        if manifest.run_id != self._run_id:
            raise WeightsError(f"manifest of run {manifest.run_id!r} announced to a receiver of run {self._run_id!r}")
        with self._changed:
            in_hand = (self._working, self._ready.manifest if self._ready else None)
            if manifest.order < self._newest or _identity(manifest) in map(_identity, in_hand):
                return
            self._newest = manifest.order
            if self._ready is not None and self._ready.manifest.epoch < manifest.epoch:
                self._ready.release()
                self._ready = None
            self._wanted, self._retry_at = manifest, 0.0
            self._changed.notify_all()

    def ready(self) -> Prepared | None:
        """The prepared version, once; the buffer of the one handed out before it is free from then on. Never blocks."""
        with self._changed:
            self._clear_wake()
            if self._crash is not None:
                raise WeightsError("the weight receiver's thread failed") from self._crash
            prepared, self._ready = self._ready, None
            if prepared is not None:
                if self._lent is not None:
                    self._lent.release()
                self._lent = prepared
                self._changed.notify_all()
        return prepared

    def wait(self, timeout_s: float) -> Prepared | None:
        """As :meth:`ready`, but wait for it at most ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._crash, timeout_s)
        return self.ready()

    def fileno(self) -> int:
        """Descriptor that is readable when :meth:`ready` has something."""
        return self._wake

    def close(self) -> None:
        """End the thread, a transfer included, and free the buffers."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        os.eventfd_write(self._stop, 1)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise DeadlineError(f"the weight receiver did not stop within {_CLOSE_S:.0f} s")
        os.close(self._stop)
        os.close(self._wake)
        self._reader.close()
        for prepared in (self._lent, self._ready):
            if prepared is not None:
                prepared.release()
        self._share.close()
        self._buffers.clear()

    def _run(self) -> None:
        try:
            while (manifest := self._next()) is not None:
                try:
                    prepared = self._prepare(manifest)
                except TransferError as error:
                    self._fail(manifest, error)
                else:
                    self._offer(prepared)
        except Exception as error:  # the actor's thread must learn of it: raised from ready()
            with self._changed:
                self._crash = error
                self._changed.notify_all()
            os.eventfd_write(self._wake, 1)
        finally:
            self._puller.close()

    def _next(self) -> Manifest | None:
        """Wait for a version to prepare; None when closed."""
        with self._changed:
            while not self._closed:
                delay = self._retry_at - time.monotonic() if self._wanted else _IDLE_S
                if delay <= 0:
                    self._working, self._wanted = self._wanted, None
                    return self._working
                self._changed.wait(delay)
        return None

    def _prepare(self, manifest: Manifest) -> Prepared:
        began = time.monotonic()
        view = self._map(manifest)
        if view is not None:
            try:
                manifest.verify(view)
            except WeightsError as error:
                raise TransferError("superseded", f"{error}; its slot was overwritten meanwhile") from None
            return Prepared(manifest=manifest, data=view, transfer_s=time.monotonic() - began, path="shm")
        self._await_room(manifest)
        began = time.monotonic()
        copy, buffer = self._obtain(manifest)
        if copy is not None:
            manifest = replace(manifest, segment=str(copy.path), host=self._host)
        return Prepared(manifest=manifest, data=buffer, transfer_s=time.monotonic() - began, path="zmq", copy=copy)

    def _obtain(self, manifest: Manifest) -> tuple[Copy | None, memoryview]:
        """The bytes over ZeroMQ: the copy of this host, or a buffer of our own."""
        try:
            copy = self._share.obtain(manifest, lambda into, pulse: self._pull(manifest, into, pulse))
        except OSError as error:
            if not self._told:
                print(f"weights: no copy for all receivers of this host ({error}); each pulls its own", flush=True)
                self._told = True
        else:
            return copy, copy.data
        buffer = self._free_buffer(manifest)
        self._pull(manifest, buffer)
        return None, buffer

    def _pull(self, manifest: Manifest, into: memoryview, pulse: Callable[[], None] = lambda: None) -> None:
        self._puller.address = self._weights_address()
        self._puller.pull(manifest, into, pulse)

    def _map(self, manifest: Manifest) -> memoryview | None:
        """The segment of this version; None: take ZeroMQ."""
        if self._path == "zmq" or (self._path == "auto" and manifest.host != self._host):
            return None
        try:
            return self._reader.open(manifest)
        except WeightsError as error:
            if self._path == "auto":
                return None
            raise TransferError("no_segment", f"{error}; weights.path = 'auto' or 'zmq' works across hosts") from None

    def _await_room(self, manifest: Manifest) -> None:
        """Wait until the actor has taken what is prepared, if it holds another version already.

        Raises:
            TransferError: closed, or a newer version was announced, before it had.
        """
        with self._changed:
            while not self._closed and self._wanted is None:
                if self._ready is None or self._lent is None:
                    return
                self._changed.wait(_IDLE_S)
        raise TransferError("superseded", f"version {manifest.version}: a newer one came before there was room for it")

    def _free_buffer(self, manifest: Manifest) -> memoryview:
        """One of two buffers, that nobody reads."""
        with self._changed:
            in_use = [p.data for p in (self._lent, self._ready) if p is not None]
            self._buffers = [b for b in self._buffers if b.nbytes == manifest.nbytes or any(b is d for d in in_use)]
            for buffer in self._buffers:
                if not any(buffer is data for data in in_use):
                    return buffer
            self._buffers.append(np.empty(manifest.nbytes, np.uint8).data)
            return self._buffers[-1]

    def _offer(self, prepared: Prepared) -> None:
        with self._changed:
            self._working = None
            if prepared.manifest.epoch < self._newest[0]:
                prepared.release()
                return
            if self._ready is not None:
                self._ready.release()
            self._ready = prepared
            self._changed.notify_all()
            os.eventfd_write(self._wake, 1)  # not after it was taken, when it would wake for nothing

    def _fail(self, manifest: Manifest, error: TransferError) -> None:
        with self._changed:
            self._working = None
            self.failures[error.reason] += 1
            self.last_failure = str(error)
            if self._wanted is None:
                self._wanted, self._retry_at = manifest, time.monotonic() + _RETRY_S

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return


def _identity(manifest: Manifest | None) -> tuple[tuple[int, int], str] | None:
    """What stays the same wherever its segment lies."""
    return (manifest.order, manifest.checksum) if manifest is not None else None
