"""The weight receiver: prepares versions in its own thread while the actor goes on generating.

    actor thread                     prepare thread
    fetch(manifest) ──newest wins──► shm: map the segment, verify each chunk in place
    fileno() readable ◄──────────── zmq: pull chunks into the free one of two buffers
    ready() ──► Prepared ──► engine.load_weights ──► live

A transfer that has begun is finished although a newer version is announced meanwhile: aborting it would starve an actor
whose transfers take longer than a step. A slot that was overwritten meanwhile is a failure with reason ``superseded``.
After any failure the newest version is tried again, at once if a newer one was announced, else after a second.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from async_rl.curve import ClientKeys
from async_rl.errors import DeadlineError, WeightsError
from async_rl.process import host_id
from async_rl.weights.manifest import Manifest
from async_rl.weights.puller import Puller, TransferError
from async_rl.weights.segment import SegmentReader

_RETRY_S = 1.0
_IDLE_S = 60.0
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A version whose bytes were verified against its manifest."""

    manifest: Manifest
    data: memoryview
    """The flat bytes [manifest.nbytes]: read-only shared memory, or a receive buffer that stays valid until
    :meth:`Receiver.ready` hands out the next version."""
    transfer_s: float
    """From the start of the transfer until the last chunk was verified."""
    path: Literal["shm", "zmq"]


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
            if manifest.order < self._newest or manifest in in_hand:
                return
            self._newest = manifest.order
            if self._ready is not None and self._ready.manifest.epoch < manifest.epoch:
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
        buffer = self._free_buffer(manifest)
        began = time.monotonic()
        self._puller.address = self._weights_address()
        self._puller.pull(manifest, buffer)
        return Prepared(manifest=manifest, data=buffer, transfer_s=time.monotonic() - began, path="zmq")

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

    def _free_buffer(self, manifest: Manifest) -> memoryview:
        """One of two buffers that nobody reads; waits until the actor takes the prepared version if both are in use.

        Raises:
            TransferError: closed, or a newer version was announced, before one was free.
        """
        with self._changed:
            while not self._closed and self._wanted is None:
                in_use = [p.data for p in (self._lent, self._ready) if p is not None]
                free = [b for b in self._buffers if not any(b is data for data in in_use)]
                for buffer in free:
                    if buffer.nbytes == manifest.nbytes:
                        return buffer
                    self._buffers.remove(buffer)
                if len(self._buffers) < 2:
                    self._buffers.append(np.empty(manifest.nbytes, np.uint8).data)
                    return self._buffers[-1]
                self._changed.wait(_IDLE_S)
        raise TransferError("superseded", f"version {manifest.version}: a newer one came before its buffer was free")

    def _offer(self, prepared: Prepared) -> None:
        with self._changed:
            self._working = None
            if prepared.manifest.epoch < self._newest[0]:
                return
            self._ready = prepared
            self._changed.notify_all()
        os.eventfd_write(self._wake, 1)

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
