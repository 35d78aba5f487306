"""The chunk server: sends chunks of the newest versions to receivers on other hosts, straight from shared memory.

    receiver ──get {version, chunk}──► ROUTER ──► [chunk {version, chunk} | frame]   frame: a view of the segment
                                              └─► [gone {version, newest}]           no longer held

The receiver has the credit: it asks for a few chunks at a time, so a slow one costs nothing but its own time. A peer
that asks and never reads meets the socket's high-water mark, and its answers are dropped and counted. A chunk may be
overwritten while it is being sent; the receiver's checksum finds that.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Any

import zmq

from async_rl.curve import Gate, ServerKeys, secure_server
from async_rl.errors import DeadlineError, WeightsError, WireError
from async_rl.weights.manifest import Manifest
from async_rl.weights.segment import SegmentReader
from async_rl.wire import pack_header, unpack_header

_START_S = 10.0
_IDLE_MS = 60_000
_REQUEST_BYTES = 4096
_UNREAD_MESSAGES = 128


class WeightServer:
    """A daemon thread with its own ROUTER socket, on the learner's host.

    Args:
        bind: e.g. ``tcp://127.0.0.1:*``.
        keys: only clients that these know are let in; ``None``: everyone.
    """

    def __init__(self, bind: str, keys: ServerKeys | None = None) -> None:
        self._bind = bind
        self._keys = keys
        self._address = ""
        self._error: Exception | None = None
        self._bound = threading.Event()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="weight-server", daemon=True)
        self._lock = threading.Lock()
        self._reader = SegmentReader()
        self._held: dict[str, tuple[Manifest, memoryview]] = {}
        self.counts: Counter[str] = Counter()
        """``served``, ``gone``, ``malformed`` and ``dropped`` requests; ``bytes`` of chunks served."""

    def start(self) -> None:
        """Bind and serve.

        Raises:
            WeightsError: the address cannot be bound.
            DeadlineError: the thread did not come up.
        """
        self._thread.start()
        if not self._bound.wait(_START_S):
            raise DeadlineError(f"the weight server did not bind {self._bind} within {_START_S:.0f} s")
        if self._error is not None:
            raise WeightsError(f"the weight server cannot bind {self._bind}: {self._error}; choose another address")

    @property
    def address(self) -> str:
        """The bound address, port resolved."""
        return self._address

    def serve(self, manifest: Manifest) -> None:
        """Hold this version from now on. It takes the place of the one whose segment it was written over.

        Raises:
            WeightsError: the segment is not on this host.
        """
        data = self._reader.open(manifest)
        with self._lock:
            self._held[manifest.segment] = (manifest, data)

    def close(self) -> None:
        """Stop the thread and drop the mappings."""
        os.eventfd_write(self._stop, 1)
        if self._thread.is_alive():
            self._thread.join(_START_S)
        if self._thread.is_alive():
            raise DeadlineError(f"the weight server did not stop within {_START_S:.0f} s")
        os.close(self._stop)
        self._held.clear()
        self._reader.close()

    def _run(self) -> None:
        context = zmq.Context()
        gate = Gate(context, self._keys) if self._keys is not None else None
        try:
            with context.socket(zmq.ROUTER) as socket:
                socket.set(zmq.LINGER, 0)
                socket.set(zmq.ROUTER_MANDATORY, 1)
                socket.set(zmq.MAXMSGSIZE, _REQUEST_BYTES)
                socket.set(zmq.SNDHWM, _UNREAD_MESSAGES)
                if self._keys is not None:
                    secure_server(socket, self._keys)
                try:
                    socket.bind(self._bind)
                except zmq.ZMQError as error:
                    self._error = error
                    return
                finally:
                    if self._error is None:
                        self._address = socket.get_string(zmq.LAST_ENDPOINT)
                    self._bound.set()
                self._serve_until_stopped(socket)
        finally:
            if gate is not None:
                gate.close()
            context.destroy(linger=0)

    def _serve_until_stopped(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(_IDLE_MS))
            if self._stop in ready:
                return
            if socket not in ready:
                continue
            peer, *parts = socket.recv_multipart(zmq.NOBLOCK)
            try:
                socket.send_multipart([peer, *self._answer(parts)], flags=zmq.NOBLOCK, copy=False)
            except WireError:
                self.counts["malformed"] += 1
            except zmq.ZMQError:  # the peer does not read its answers, or is gone
                self.counts["dropped"] += 1

    def _answer(self, parts: list[bytes]) -> list[Any]:
        if len(parts) != 1:
            raise WireError("frame_count", f"{len(parts)}")
        header = unpack_header(parts[0])
        epoch, version, chunk = header.get("epoch", 0), header.get("version"), header.get("chunk")
        if header["type"] != "get" or type(epoch) is not int or type(version) is not int or type(chunk) is not int:
            raise WireError("bad_header", "a request is get {epoch, version, chunk}")
        with self._lock:
            held = [entry for entry in self._held.values() if entry[0].order == (epoch, version)]
            newest = max((manifest.version for manifest, _ in self._held.values()), default=-1)
        if not held:
            self.counts["gone"] += 1
            return [pack_header({"type": "gone", "version": version, "newest": newest})]
        manifest, data = held[0]
        if not 0 <= chunk < len(manifest.chunks):
            raise WireError("bad_header", f"chunk {chunk} of {len(manifest.chunks)}")
        part = manifest.chunk(data, chunk)
        self.counts["served"] += 1
        self.counts["bytes"] += part.nbytes
        return [pack_header({"type": "chunk", "version": version, "chunk": chunk}), part]
