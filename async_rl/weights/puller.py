"""Pulls one version of the weights, chunk by chunk, each verified as it arrives: from the learner, or from other hosts.

    fill ─► Pull: ask all sources ─► wait for whoever answers ─► receive ─► what time does ─► until nothing is missing

Whom it asks for what, and when it gives somebody up, is in :mod:`async_rl.weights.pull`. In any case it ends. Who was
given up is not asked for a minute, so that a host that nobody reaches costs its patience once and not for each version.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping

import zmq

from async_rl.curve import ClientKeys, secure_client
from async_rl.route import speak_its_family
from async_rl.weights.filling import Filling
from async_rl.weights.manifest import Manifest
from async_rl.weights.pull import WINDOW_CHUNKS, Pull, TransferError, watched
from async_rl.weights.tree import Parent

_HEADER_BYTES = 4096
_AVOIDED_S = 60.0


def _nothing() -> None:
    """Nobody wants to know."""


class Puller:
    """Fetches versions over ZeroMQ. Belongs to one thread.

    Args:
        address: of the learner's :class:`~async_rl.weights.server.WeightServer`.
        stop: descriptor that becomes readable when a pull must end at once.
        stall_s: longest time without a good chunk before the connection is made anew.
        keys: of a server that lets in only those whom it knows.
    """

    def __init__(self, address: str, stop: int, stall_s: float = 5.0, keys: ClientKeys | None = None) -> None:
        self.address = address
        """Where the next pull connects to."""
        self.parents: tuple[Parent, ...] = ()
        """Whom the next pull asks for its stripes; empty: the learner for all."""
        self.counts: Counter[str] = Counter()
        """See :mod:`async_rl.weights.pull`."""
        self._avoided: dict[str, float] = {}
        """Addresses of parents, until when the learner is asked in their place."""
        self._stop = stop
        self._stall_s = stall_s
        self._keys = keys
        self._context = zmq.Context()

    def pull(self, manifest: Manifest, into: memoryview, pulse: Callable[[], None] = _nothing) -> None:
        """As :meth:`fill`, of a buffer of which nothing is there yet."""
        self.fill(Filling(manifest, into), pulse)

    def fill(self, filling: Filling, pulse: Callable[[], None] = _nothing, news: Callable[[], None] = _nothing) -> None:
        """Pull what is missing. What has arrived stays in ``filling`` whatever happens: pull it again to go on.

        Args:
            filling: the version.
            pulse: called at least once in ``stall_s``.
            news: called for each chunk.

        Raises:
            TransferError: the learner no longer holds the version, does not answer, or keeps sending wrong bytes.
        """
        pull = Pull(filling, self.address, self._fit_parents(), self._stall_s, self._connect, self.counts)
        try:
            while not filling.complete:
                for source in pull.sources:
                    pull.ask(source)
                self._take(pull, news)
                pulse()
                pull.look(time.monotonic())
        finally:
            for source in pull.sources:
                source.close()
            self._avoid(pull.unfit)

    def close(self) -> None:
        """Free the context."""
        self._context.destroy(linger=0)

    def _take(self, pull: Pull, news: Callable[[], None]) -> None:
        """Wait until something arrives, for a stall at most, and take one message of each source."""
        poller = zmq.Poller()
        poller.register(self._stop, zmq.POLLIN)
        for source in pull.sources:
            poller.register(source.socket, zmq.POLLIN)
            if source.watch is not None and not source.is_done:
                poller.register(source.watch, zmq.POLLIN)
        left_s = min(self._stall_s, pull.deadline - time.monotonic())
        ready = dict(poller.poll(max(1, math.ceil(left_s * 1e3))))
        if self._stop in ready:
            raise TransferError("closed", f"version {pull.filling.manifest.version}: the receiver was closed")
        for source in [source for source in pull.sources if source.socket in ready]:
            if pull.receive(source, source.socket.recv_multipart(zmq.NOBLOCK, copy=False)):
                news()
        for source in [source for source in pull.sources if source.watch in ready and source.socket not in ready]:
            pull.lost(source)  # once all is taken that has come before

    def _fit_parents(self) -> tuple[Parent, ...]:
        now = time.monotonic()
        self._avoided = {address: until for address, until in self._avoided.items() if until > now}
        return tuple(Parent("", -1) if parent.address in self._avoided else parent for parent in self.parents)

    def _avoid(self, unfit: Mapping[str, str]) -> None:
        for address, why in unfit.items():
            self._avoided[address] = time.monotonic() + _AVOIDED_S
            print(f"weights: {address} is asked for nothing for {_AVOIDED_S:.0f} s, the learner is: {why}", flush=True)

    def _connect(self, address: str, manifest: Manifest, *, relay: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.set(zmq.LINGER, 0)
            # a failed handshake leaves nobody to send to
            socket.set(zmq.SNDTIMEO, 0 if relay else max(1, round(self._stall_s * 1e3)))
            socket.set(zmq.MAXMSGSIZE, max(manifest.chunk_bytes, _HEADER_BYTES))
            socket.set(zmq.RCVHWM, 2 * WINDOW_CHUNKS[1])
            if self._keys is not None:
                secure_client(socket, self._keys.of_peer() if relay else self._keys)
            if relay:
                watched(socket)
            speak_its_family(socket, address)
            socket.connect(address)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket
