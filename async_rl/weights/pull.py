"""The state of one pull: which chunks are to be asked of whom, what was asked for, and who is left since he failed.

    chunk i ─► Source of parent i mod k ──ask──► at most 16 MiB of each ──receive──► Filling: verified ─► done
                  │ lost, silent, gone, slow, or one wrong chunk        │ a wrong difference: the chunk itself
                  └─► the learner ──no chunk for stall_s: a new connection, twice──► an error; what is done stays

A parent whose connection ends is left at once. One that is silent is given more time the farther it is from the
learner, so that one near the learner does not send all below it to the learner at once. The loop around it is
:mod:`async_rl.weights.puller`.

| counts           |                                                                                     |
|------------------|-------------------------------------------------------------------------------------|
| ``learner_bytes``, ``relay_bytes`` | of good chunks, by whom they came from                            |
| ``chunks``, ``delta_chunks``       | good ones, and those of them that came as differences             |
| ``failed_deltas``                  | differences that led to wrong bytes: the chunk itself was asked for |
| ``relays_left``                    | parents that were given up for the learner                        |
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Literal

import zmq

from async_rl.errors import WeightsError, WireError
from async_rl.weights.filling import Filling
from async_rl.weights.tree import Parent
from async_rl.wire import pack_header, unpack_header

_WINDOW_BYTES = 16 << 20
WINDOW_CHUNKS = (4, 64)
"""Fewest and most chunks that are asked for at a time."""
_MAX_REPEATS = 3
_MAX_STALLS = 2
_SLOW = 2.0
"""A parent has so many times as long for a chunk as the first one that was done, and its patience more."""

COUNTED = ("learner_bytes", "relay_bytes", "chunks", "delta_chunks", "failed_deltas", "relays_left")
"""Names of what is counted of pulls; see above."""

Reason = Literal["superseded", "corrupted", "no_segment", "no_progress", "unreachable", "closed"]


class TransferError(WeightsError):
    """A version could not be fetched; ``reason`` is counted. ``superseded`` is part of normal life."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def window(chunk_bytes: int) -> int:
    """Chunks of this size that are asked for at a time."""
    fewest, most = WINDOW_CHUNKS
    return min(max(_WINDOW_BYTES // chunk_bytes, fewest), most)


class Source:
    """One whom chunks are asked of.

    Args:
        address: of its chunk server.
        socket: connected to it.
        patience_s: longest time without a chunk.
        relay: it is another actor host; its socket is watched (:func:`watched`).
    """

    def __init__(self, address: str, socket: zmq.Socket[bytes], patience_s: float, *, relay: bool) -> None:
        self.address, self.socket, self.is_relay = address, socket, relay
        self.patience_s = patience_s
        self.watch = watched(socket) if relay else None
        """Readable when the connection to a relay has ended, or could not be made."""
        self.todo: deque[int] = deque()
        self.asked: set[int] = set()
        self.num_good = 0
        """Chunks that have come."""
        self.deadline = math.inf
        """Until when a chunk has to come; inf: nothing is asked for."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is wanted of it any more."""
        return not (self.todo or self.asked)

    def close(self) -> None:
        """Close what it has open."""
        if self.watch is not None:
            self.socket.disable_monitor()
            self.watch.close()
        self.socket.close()


def watched(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """What says that a connection has ended; call it before ``connect``, and it gives the same one again."""
    return socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)


class Pull:
    """One pull.

    Args:
        filling: what is pulled.
        learner: address of its chunk server.
        parents: whom each stripe is asked of; empty: the learner.
        stall_s: longest time without a chunk of the learner.
        connect: makes a socket of an address, a manifest, and whether it is a relay.
        counts: what happens is counted there; see above.

    Raises:
        TransferError: ``unreachable``: the learner has no usable address.
    """

    def __init__(
        self,
        filling: Filling,
        learner: str,
        parents: tuple[Parent, ...],
        stall_s: float,
        connect: Callable[..., zmq.Socket[bytes]],
        counts: Counter[str],
    ) -> None:
        self.filling = filling
        self._stall_s, self._connect, self._counts = stall_s, connect, counts
        self._window = window(filling.manifest.chunk_bytes)
        self._began = time.monotonic()
        self._pace_s = math.inf
        """Seconds a chunk of whoever was done first."""
        self._stalls = 0
        self._repeats: Counter[int] = Counter()
        self._plain: set[int] = set()
        """Chunks whose difference was wrong."""
        self.unfit: dict[str, str] = {}
        """Why parents were left that better be asked nothing for a while, by address; not who is just behind."""
        self._learner = Source(learner, self._reach(learner), stall_s, relay=False)
        self._relays: dict[str, Source] = {}
        for chunk in filling.missing():
            parent = parents[chunk % len(parents)] if parents else None
            self._source(parent).todo.append(chunk)

    @property
    def sources(self) -> list[Source]:
        """The learner, then those that relay."""
        return [self._learner, *self._relays.values()]

    @property
    def deadline(self) -> float:
        """When :meth:`look` has something to do at the latest."""
        slow = [self._slow_at(source) for source in self._relays.values() if not source.is_done]
        return min([source.deadline for source in self.sources] + slow)

    def ask(self, source: Source) -> None:
        """Fill its window."""
        manifest = self.filling.manifest
        while source.todo and len(source.asked) < self._window:
            chunk = source.todo.popleft()
            if not source.asked:
                source.deadline = time.monotonic() + source.patience_s
            source.asked.add(chunk)
            request = {"type": "get", "epoch": manifest.epoch, "version": manifest.version, "chunk": chunk}
            if self.filling.base and chunk not in self._plain:
                request["base"] = self.filling.base
            try:
                source.socket.send(pack_header(request))
            except zmq.ZMQError as error:
                if not source.is_relay:
                    raise TransferError("unreachable", f"weight server {source.address}: {error}") from None
                self._leave(source, str(error))
                return

    def receive(self, source: Source, parts: list[Any]) -> bool:
        """Take one message; True when it was a good chunk."""
        manifest = self.filling.manifest
        try:
            header = unpack_header(parts[0].buffer)
        except WireError:
            return False
        if header["type"] == "gone" and header.get("version") == manifest.version:
            if source.is_relay:
                self._leave(source, "")
                return False
            newest = header.get("newest")
            raise TransferError("superseded", f"version {manifest.version} is no longer held, the newest is {newest}")
        chunk, base = header.get("chunk"), header.get("base", "")
        if header["type"] != "chunk" or type(chunk) is not int or chunk not in source.asked:
            return False
        is_difference = base != ""
        if not is_difference and len(parts) != 2:
            return False
        source.asked.remove(chunk)
        known = not is_difference or base == self.filling.base
        frames = [part.buffer for part in parts[1:]]
        if known and self.filling.take(chunk, frames, differences=is_difference):
            self._good(source, sum(frame.nbytes for frame in frames), is_difference=is_difference)
            return True
        self._bad(source, chunk, is_difference=is_difference)
        return False

    def lost(self, source: Source) -> None:
        """The connection to a relay has ended, or could not be made."""
        if source.address in self._relays and not source.is_done:
            self._leave(source, "its connection has ended, or could not be made")

    def look(self, now: float) -> None:
        """What time does: a parent that relays is left, the learner is connected to anew.

        Raises:
            TransferError: too often.
        """
        for source in list(self._relays.values()):
            if now >= source.deadline:
                self._leave(source, f"no chunk for {source.patience_s:g} s")
            elif not source.is_done and now >= self._slow_at(source):
                self._leave(source, f"{_SLOW:g} times as slow as another")
        if now < self._learner.deadline:
            return
        self._stalls += 1
        if self._stalls > _MAX_STALLS:
            version, num_done, num = self.filling.manifest.version, self.filling.num_done, len(self.filling.done)
            raise TransferError(
                "no_progress",
                f"version {version}: weight server {self._learner.address} sent no chunk for {self._stall_s:g} s, "
                f"{_MAX_STALLS + 1} times; {num_done} of {num} chunks arrived",
            )
        self._learner.close()
        self._learner.socket = self._reach(self._learner.address)
        self._learner.todo.extendleft(self._learner.asked)
        self._learner.asked.clear()

    def _slow_at(self, source: Source) -> float:
        """When one that is not done is too slow."""
        wanted = source.num_good + len(source.asked) + len(source.todo)
        return self._began + _SLOW * self._pace_s * wanted + source.patience_s

    def _source(self, parent: Parent | None) -> Source:
        """Whom to ask; the learner where a relay cannot be used."""
        if parent is None or not parent.address:
            return self._learner
        if parent.address not in self._relays:
            try:
                socket = self._connect(parent.address, self.filling.manifest, relay=True)
            except zmq.ZMQError as error:
                self._counts["relays_left"] += 1
                self.unfit[parent.address] = str(error)
                return self._learner
            patience_s = (parent.depth + 2) * self._stall_s
            self._relays[parent.address] = Source(parent.address, socket, patience_s, relay=True)
        return self._relays[parent.address]

    def _reach(self, learner: str) -> zmq.Socket[bytes]:
        try:
            return self._connect(learner, self.filling.manifest, relay=False)
        except zmq.ZMQError as error:
            raise TransferError("unreachable", f"weight server {learner}: {error}") from None

    def _good(self, source: Source, nbytes: int, *, is_difference: bool) -> None:
        now = time.monotonic()
        self._counts["relay_bytes" if source.is_relay else "learner_bytes"] += nbytes
        self._counts["chunks"] += 1
        self._counts["delta_chunks"] += is_difference
        source.deadline = now + source.patience_s if source.asked else math.inf
        source.num_good += 1
        if source.is_done:
            self._pace_s = min(self._pace_s, (now - self._began) / source.num_good)

    def _bad(self, source: Source, chunk: int, *, is_difference: bool) -> None:
        """A chunk was wrong: ask again for the chunk itself, or ask the learner; its own are asked for a few times."""
        source.todo.appendleft(chunk)
        if is_difference and chunk not in self._plain:
            self._counts["failed_deltas"] += 1
            self._plain.add(chunk)
            return
        if source.is_relay:
            self._leave(source, f"wrong bytes of chunk {chunk} of version {self.filling.manifest.version}")
            return
        self._repeats[chunk] += 1
        if self._repeats[chunk] > _MAX_REPEATS:
            raise TransferError(
                "corrupted",
                f"version {self.filling.manifest.version}: chunk {chunk} came {self._repeats[chunk]} times with wrong "
                "bytes (its slot is being overwritten, or the network corrupts it)",
            )

    def _leave(self, source: Source, why: str) -> None:
        """Ask the learner for what this one did not send; ``why`` it is unfit, empty: it is just behind."""
        self._counts["relays_left"] += 1
        if why:
            self.unfit[source.address] = why
        source.close()
        del self._relays[source.address]
        self._learner.todo.extend(sorted({*source.asked, *source.todo}))
        source.todo.clear()
        source.asked.clear()
