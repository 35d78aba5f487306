"""The weight receiver: prepares versions in its own thread while the actor goes on generating.

    actor thread                     prepare thread
    fetch(manifest) ──newest wins──► shm: map the segment, verify each chunk in place
    fileno() readable ◄──────────── zmq: one receiver of the host pulls chunks into a copy, all map and verify it
    ready() ──► Prepared ──► engine.load_weights ──► live
    follow(parents): whom chunks are pulled from ───── how they come: :mod:`actors.carrier`

A transfer that has begun is finished although a newer version is announced meanwhile: aborting it would starve an actor
whose transfers take longer than a step. A slot that was overwritten meanwhile is a failure with reason ``superseded``.
After any failure the newest version is tried again, at once if a newer one was announced, else after a second; then
only the chunks that are missing are pulled.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from actors.carrier import Carrier
from actors.prepared import Prepared
from actors.relay import Relay
from async_rl.curve import ClientKeys
from async_rl.errors import DeadlineError, WeightsError
from async_rl.process import host_id
from async_rl.weights.filling import Base
from async_rl.weights.manifest import Manifest
from async_rl.weights.pull import TransferError
from async_rl.weights.segment import SegmentReader
from async_rl.weights.tree import Parent

_RETRY_S = 1.0
_IDLE_S = 60.0
_CLOSE_S = 10.0
_HEAD_START_S = 0.05
"""For the receiver that sends on; should another one be faster, that sends on when it has all."""
_WORD_S = 2.0
"""For the server to say whom the first version is pulled from; after that it is the learner."""


class Receiver:
    """One per actor process. All methods belong to the actor's thread.

    Args:
        path: ``auto`` takes shared memory if the segment is on this host, else ZeroMQ.
        weights_address: gives the chunk server's address; asked for each transfer.
        run_id: versions of other runs are refused.
        stall_s: longest time without a chunk before a transfer is taken up anew.
        keys: of a server that lets in only those whom it knows.
        relay: sends on what is here; it is closed with the receiver.
        delta: ask for the difference to the version that is held.
        follows: :meth:`follow` will be called soon; the first version waits for it a moment.
        host: what this host is called; a benchmark pretends to be several.
    """

    def __init__(
        self,
        path: Literal["auto", "shm", "zmq"],
        weights_address: Callable[[], str],
        run_id: str,
        stall_s: float = 5.0,
        keys: ClientKeys | None = None,
        *,
        relay: Relay | None = None,
        delta: bool = False,
        follows: bool = False,
        host: str = "",
    ) -> None:
        self._path = path
        self._run_id = run_id
        self._host = host or host_id()
        self._parents: tuple[Parent, ...] = ()
        self._leads = True
        self._awaits_word = follows
        self._changed = threading.Condition()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._reader = SegmentReader()
        name = f"{run_id}-{host}" if host else run_id
        self._carrier = Carrier(weights_address, name, self._stop, stall_s, keys, relay=relay, delta=delta)
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
                before, self._ready = self._ready, None
                self._release(before)
            self._wanted, self._retry_at = manifest, time.monotonic() + self._delay_s()
            self._changed.notify_all()

    def follow(self, parents: Sequence[Parent], *, leads: bool = True) -> None:
        """Pull from these from the next transfer on, each a stripe; empty: all from the learner. Never blocks.

        Args:
            parents: one for each stripe.
            leads: of the receivers of this host this one is to pull; others let it begin first.
        """
        with self._changed:
            self._parents, self._leads = tuple(parents), leads
            if self._awaits_word:
                self._awaits_word = False
                self._retry_at = time.monotonic() + self._delay_s()
                self._changed.notify_all()

    def ready(self) -> Prepared | None:
        """The prepared version, once; the buffer of the one handed out before it is free from then on. Never blocks."""
        with self._changed:
            self._clear_wake()
            if self._crash is not None:
                raise WeightsError("the weight receiver's thread failed") from self._crash
            prepared, self._ready = self._ready, None
            if prepared is not None:
                before, self._lent = self._lent, prepared
                self._release(before)
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
        self._carrier.keep(())
        for prepared in (self._lent, self._ready):
            if prepared is not None:
                prepared.release()
        self._carrier.close()

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
            self._carrier.end()

    def _next(self) -> Manifest | None:
        """Wait for a version to prepare; None when closed."""
        with self._changed:
            while not self._closed:
                delay = self._retry_at - time.monotonic() if self._wanted else _IDLE_S
                if delay <= 0:
                    self._working, self._wanted, self._awaits_word = self._wanted, None, False
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
        with self._changed:
            self._keep()
            parents = self._parents
        copy, buffer = self._carrier.bring(manifest, parents, self._base, self._in_use)
        if copy is not None:
            manifest = replace(manifest, segment=str(copy.path), host=self._host)
        return Prepared(
            manifest=manifest,
            data=buffer,
            transfer_s=time.monotonic() - began,
            path="zmq",
            copy=copy,
            received=self._carrier.received,
        )

    def _base(self) -> Base | None:
        """The newest version that is here, which stays while another one is pulled."""
        with self._changed:
            newest = self._ready or self._lent
        return newest.base if newest is not None and newest.path == "zmq" else None

    def _in_use(self) -> list[memoryview]:
        with self._changed:
            return [p.data for p in (self._lent, self._ready) if p is not None]

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

    def _offer(self, prepared: Prepared) -> None:
        with self._changed:
            self._working = None
            if prepared.manifest.epoch < self._newest[0]:
                self._release(prepared)
                return
            before, self._ready = self._ready, prepared
            self._release(before)
            self._changed.notify_all()
            os.eventfd_write(self._wake, 1)  # not after it was taken, when it would wake for nothing

    def _release(self, prepared: Prepared | None) -> None:
        """Nobody reads it any more, nor does anybody pull it from here; called with the lock."""
        if prepared is not None:
            self._keep()
            prepared.release()

    def _keep(self) -> None:
        """What is sent on to others is what is in use here; called with the lock."""
        here = (p.manifest for p in (self._ready, self._lent) if p is not None)
        self._carrier.keep({m.order for m in (*here, self._working) if m is not None})

    def _fail(self, manifest: Manifest, error: TransferError) -> None:
        with self._changed:
            self._working = None
            self._keep()  # what has come stays with us, or its memory is written over
            self.failures[error.reason] += 1
            self.last_failure = str(error)
            if self._wanted is None:
                self._wanted, self._retry_at = manifest, time.monotonic() + _RETRY_S

    def _delay_s(self) -> float:
        """From an announcement to the transfer; called with the lock."""
        if self._awaits_word:
            return _WORD_S
        return 0.0 if self._leads else _HEAD_START_S

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return


def _identity(manifest: Manifest | None) -> tuple[tuple[int, int], str] | None:
    """What stays the same wherever its segment lies."""
    return (manifest.order, manifest.checksum) if manifest is not None else None
