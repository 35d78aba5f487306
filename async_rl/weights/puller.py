"""Pulls one version of the weights from a chunk server, chunk by chunk, each verified as it arrives.

    todo ──get──► at most 16 MiB asked for ──chunk──► copy into the buffer ──xxh3──► done
      ▲                     │ no chunk for stall_s: a new connection           │ mismatch
      └─────────────────────┴──────────────────────────────────────────────────┘

Both loops end after a few rounds, with an error.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal

import zmq

from async_rl.curve import ClientKeys, secure_client
from async_rl.errors import WeightsError, WireError
from async_rl.weights.manifest import Manifest, copy_checksum
from async_rl.wire import pack_header, unpack_header

_WINDOW_BYTES = 16 << 20
_WINDOW_CHUNKS = (4, 64)
_MAX_REPEATS = 3
_MAX_STALLS = 2
_HEADER_BYTES = 4096

Reason = Literal["superseded", "corrupted", "no_segment", "no_progress", "unreachable", "closed"]


class TransferError(WeightsError):
    """A version could not be fetched; ``reason`` is counted. ``superseded`` is part of normal life."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def window(chunk_bytes: int) -> int:
    """Chunks of this size that are asked for at a time."""
    fewest, most = _WINDOW_CHUNKS
    return min(max(_WINDOW_BYTES // chunk_bytes, fewest), most)


class Puller:
    """Fetches versions over ZeroMQ. Belongs to one thread.

    Args:
        address: of a :class:`~async_rl.weights.server.WeightServer`.
        stop: descriptor that becomes readable when a pull must end at once.
        stall_s: longest time without a good chunk before the connection is made anew.
        keys: of a server that lets in only those whom it knows.
    """

    def __init__(self, address: str, stop: int, stall_s: float = 5.0, keys: ClientKeys | None = None) -> None:
        self.address = address
        """Where the next pull connects to."""
        self._stop = stop
        self._stall_s = stall_s
        self._keys = keys
        self._context = zmq.Context()

    def pull(self, manifest: Manifest, into: memoryview, pulse: Callable[[], None] = lambda: None) -> None:
        """Fill ``into`` [manifest.nbytes] with verified bytes.

        Args:
            manifest: what is pulled.
            into: where to.
            pulse: called at least once in ``stall_s``.

        Raises:
            TransferError: the server no longer holds the version, does not answer, or keeps sending wrong bytes.
        """
        pull = _Pull(manifest, into)
        for _ in range(_MAX_STALLS + 1):
            try:
                with self._connect(manifest) as socket:
                    if self._run(pull, socket, pulse):
                        return
            except zmq.ZMQError as error:
                raise TransferError("unreachable", f"weight server {self.address}: {error}") from None
            pull.restart()
            pulse()
        raise TransferError(
            "no_progress",
            f"version {manifest.version}: weight server {self.address} sent no chunk for {self._stall_s:g} s, "
            f"{_MAX_STALLS + 1} times; {pull.num_done} of {len(manifest.chunks)} chunks arrived",
        )

    def close(self) -> None:
        """Free the context."""
        self._context.destroy(linger=0)

    def _connect(self, manifest: Manifest) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDTIMEO, max(1, round(self._stall_s * 1e3)))  # a failed handshake leaves nobody to send to
        socket.set(zmq.MAXMSGSIZE, max(manifest.chunk_bytes, _HEADER_BYTES))
        socket.set(zmq.RCVHWM, 2 * _WINDOW_CHUNKS[1])
        if self._keys is not None:
            secure_client(socket, self._keys)
        socket.connect(self.address)
        return socket

    def _run(self, pull: _Pull, socket: zmq.Socket[bytes], pulse: Callable[[], None]) -> bool:
        """True when complete, False when it stalled."""
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        deadline = time.monotonic() + self._stall_s
        while not pull.complete:
            for request in pull.requests():
                socket.send(pack_header(request))
            ready = dict(poller.poll(max(1, round((deadline - time.monotonic()) * 1e3))))
            if self._stop in ready:
                raise TransferError("closed", f"version {pull.manifest.version}: the receiver was closed")
            if socket in ready and pull.receive(socket.recv_multipart(zmq.NOBLOCK, copy=False)):
                deadline = time.monotonic() + self._stall_s
                pulse()
            elif time.monotonic() >= deadline:
                return False
        return True


class _Pull:
    """The state of one pull: which chunks are to ask for, asked for, and done."""

    def __init__(self, manifest: Manifest, into: memoryview) -> None:
        if into.nbytes != manifest.nbytes:
            raise ValueError(f"a buffer of {into.nbytes} bytes for {manifest.nbytes}")
        self.manifest = manifest
        self.num_done = 0
        self._into = into
        self._todo = deque(range(len(manifest.chunks)))
        self._asked: set[int] = set()
        self._window = window(manifest.chunk_bytes)
        self._repeats: Counter[int] = Counter()

    @property
    def complete(self) -> bool:
        return self.num_done == len(self.manifest.chunks)

    def requests(self) -> list[dict[str, object]]:
        """Fill the window."""
        made: list[dict[str, object]] = []
        while self._todo and len(self._asked) < self._window:
            chunk = self._todo.popleft()
            self._asked.add(chunk)
            made.append({"type": "get", "epoch": self.manifest.epoch, "version": self.manifest.version, "chunk": chunk})
        return made

    def restart(self) -> None:
        """Ask again for what was asked for: the old connection is gone."""
        self._todo.extendleft(self._asked)
        self._asked.clear()

    def receive(self, parts: list[zmq.Frame]) -> bool:
        """Take one message; True when it was a good chunk."""
        try:
            header = unpack_header(parts[0].buffer)
        except WireError:
            return False
        if header["type"] == "gone" and header.get("version") == self.manifest.version:
            raise TransferError(
                "superseded", f"version {self.manifest.version} is no longer held, the newest is {header.get('newest')}"
            )
        chunk = header.get("chunk")
        if header["type"] != "chunk" or len(parts) != 2 or type(chunk) is not int or chunk not in self._asked:
            return False
        self._asked.remove(chunk)
        target = self.manifest.chunk(self._into, chunk)
        frame = parts[1].buffer
        if frame.nbytes == target.nbytes and copy_checksum(target, frame) == self.manifest.chunks[chunk]:
            self.num_done += 1
            return True
        self._repeats[chunk] += 1
        if self._repeats[chunk] > _MAX_REPEATS:
            raise TransferError(
                "corrupted",
                f"version {self.manifest.version}: chunk {chunk} came {self._repeats[chunk]} times with wrong bytes "
                "(its slot is being overwritten, or the network corrupts it)",
            )
        self._todo.appendleft(chunk)
        return False
