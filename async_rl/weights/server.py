"""The chunk server: sends chunks of the newest versions to receivers on other hosts, straight from shared memory.

    receiver ──get {version, chunk}──► ROUTER ──► [chunk {version, chunk} | frame]   frame: a view of the memory
                                              └─► [gone {version, newest}]           no longer held
    a relay: what is not there yet waits ──news──► answered                            see :mod:`async_rl.weights.shelf`
    differences: a few threads encode ──news──► sent                                   others are served meanwhile

The receiver has the credit: it asks for a few chunks at a time, so a slow one costs nothing but its own time. A peer
that asks and never reads meets the socket's high-water mark, and its answers are dropped and counted. A chunk may be
overwritten while it is being sent; the receiver's checksum finds that.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import zmq

from async_rl.curve import Gate, ServerKeys, secure_server
from async_rl.errors import DeadlineError, WeightsError, WireError
from async_rl.route import speak_its_family
from async_rl.weights.filling import Filling
from async_rl.weights.links import link
from async_rl.weights.manifest import Manifest
from async_rl.weights.pull import WINDOW_CHUNKS
from async_rl.weights.segment import SegmentReader
from async_rl.weights.shelf import Answer, Shelf
from async_rl.wire import Header, unpack_header

_START_S = 10.0
_IDLE_MS = 60_000
_REQUEST_BYTES = 4096
_UNREAD_MESSAGES = 128
_MOST_WAITING = 4096
"""Requests that wait for their chunk; beyond it the oldest is dropped, and its peer asks somebody else."""
_MOST_OF_A_PEER = 2 * WINDOW_CHUNKS[1]
"""Of one peer: more than it asks for at a time."""
_ENCODERS = min(4, os.cpu_count() or 1)
"""Threads that encode differences; what they do holds no lock of Python's."""


class WeightServer:
    """A daemon thread with its own ROUTER socket: on the learner's host, and in each process that relays.

    Args:
        bind: e.g. ``tcp://127.0.0.1:*``.
        keys: only clients that these know are let in; ``None``: everyone.
        patient: of a relay: requests for what is not there yet wait for it.
        delta: differences to the version before are sent to those who hold that.
    """

    def __init__(
        self, bind: str, keys: ServerKeys | None = None, *, patient: bool = False, delta: bool = False
    ) -> None:
        self._bind = bind
        self._keys = keys
        self._delta = delta
        self._address = ""
        self._error: Exception | None = None
        self._bound = threading.Event()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="weight-server", daemon=True)
        self._reader = SegmentReader()
        self._waiting: deque[tuple[bytes, Header]] = deque()
        self._waits: Counter[bytes] = Counter()
        """How many of those are of which peer."""
        self._encoders = ThreadPoolExecutor(_ENCODERS, "weight-encoder") if delta else None
        self._num_encoding = 0
        self._encoded: deque[tuple[bytes, Header, Future[Answer]]] = deque()
        self.counts: Counter[str] = Counter()
        """``served``, ``gone``, ``malformed`` and ``dropped`` requests, ``differences`` of those served; ``bytes`` of
        chunks served."""
        self._shelf = Shelf(self.counts, patient=patient)

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
            WeightsError: the segment is not on this host, or nobody serves any more.
        """
        if self._bound.is_set() and not self._thread.is_alive():
            raise WeightsError("the chunk server's thread has failed: its traceback is in the log")
        filling = Filling.whole(manifest, self._reader.open(manifest))
        before = self._shelf.put(manifest.segment, filling)
        if self._delta and before is not None:
            link(before, filling)

    def share(self, filling: Filling) -> None:
        """Hold a version that may still be filled; :meth:`news` for each chunk."""
        self._shelf.put(filling.manifest.order, filling)
        self.news()

    def keep(self, orders: Collection[Hashable]) -> None:
        """Of what was shared, hold no other versions any more: their memory is about to be written over."""
        self._shelf.keep(orders)
        self.news()

    def news(self) -> None:
        """Something has changed in what is held: whoever waits may be answered."""
        os.eventfd_write(self._news, 1)

    def close(self) -> None:
        """Stop the thread and drop the mappings."""
        os.eventfd_write(self._stop, 1)
        if self._thread.is_alive():
            self._thread.join(_START_S)
        if self._thread.is_alive():
            raise DeadlineError(f"the weight server did not stop within {_START_S:.0f} s")
        if self._encoders is not None:  # each is done with its chunk in milliseconds
            self._encoders.shutdown(cancel_futures=True)
        os.close(self._stop)
        os.close(self._news)
        self._shelf.clear()
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
                speak_its_family(socket, self._bind)
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
        for source in (socket, self._stop, self._news):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(_IDLE_MS))
            if self._stop in ready:
                return
            if self._news in ready:
                os.eventfd_read(self._news)
                self._take_up(socket)
            if socket in ready:
                peer, *parts = socket.recv_multipart(zmq.NOBLOCK)
                try:
                    self._take(socket, peer, request_of(parts))
                except WireError:
                    self.counts["malformed"] += 1

    def _take_up(self, socket: zmq.Socket[bytes]) -> None:
        """Send what was encoded, and look again at the requests that wait."""
        while self._encoded:
            peer, header, encoded = self._encoded.popleft()
            self._num_encoding -= 1
            self._reply(socket, peer, header, partial(encoded.result, timeout=0))
        waiting, self._waiting = self._waiting, deque()
        self._waits.clear()
        for peer, header in waiting:
            self._reply(socket, peer, header, partial(self._shelf.answer, header))

    def _take(self, socket: zmq.Socket[bytes], peer: bytes, header: Header) -> None:
        """A request: of a difference by a thread that encodes, else answered at once."""
        answer = partial(self._shelf.answer, header)
        if self._encoders is None or not header.get("base"):
            self._reply(socket, peer, header, answer)
        elif self._num_encoding >= _MOST_WAITING:
            self.counts["dropped"] += 1
        else:
            self._num_encoding += 1
            encoded = self._encoders.submit(answer)
            encoded.add_done_callback(lambda encoded: self._tell(peer, header, encoded))

    def _tell(self, peer: bytes, header: Header, encoded: Future[Answer]) -> None:
        """In a thread that encodes: there is something to send."""
        if not encoded.cancelled():
            self._encoded.append((peer, header, encoded))
            self.news()

    def _reply(self, socket: zmq.Socket[bytes], peer: bytes, header: Header, answer: Callable[[], Answer]) -> None:
        """Answer a request, or let it wait."""
        try:
            parts = answer()
            if parts is None:
                self._wait(peer, header)
            else:
                socket.send_multipart([peer, *parts], flags=zmq.NOBLOCK, copy=False)
        except WireError:
            self.counts["malformed"] += 1
        except zmq.ZMQError:  # the peer does not read its answers, or is gone
            self.counts["dropped"] += 1

    def _wait(self, peer: bytes, header: Header) -> None:
        if self._waits[peer] >= _MOST_OF_A_PEER:
            self.counts["dropped"] += 1
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._waits[self._waiting.popleft()[0]] -= 1
            self.counts["dropped"] += 1
        self._waits[peer] += 1
        self._waiting.append((peer, header))


def request_of(parts: list[bytes]) -> Header:
    """The header of a request.

    Raises:
        WireError: it is none.
    """
    if len(parts) != 1:
        raise WireError("frame_count", f"{len(parts)}")
    return unpack_header(parts[0])
