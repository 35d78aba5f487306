"""What a chunk server holds, and what it answers to a request. No sockets.

get {epoch, version, chunk, base?} ─► there ─► [chunk {version, chunk} | bytes]
                                   │      └──► [chunk {version, chunk, base} | differences ...]   base is known here
                                   ├─► not there yet, patient ─► None: ask again when there is news
                                   └─► [gone {version, newest}]
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Hashable
from typing import Any

from async_rl.errors import WireError
from async_rl.weights.filling import Filling
from async_rl.wire import Header, pack_header

Answer = list[Any] | None
"""Parts of a message; ``None``: not yet."""


class Shelf:
    """Versions that are served. All methods may be called from any thread.

    Args:
        counts: ``served``, ``gone`` and ``differences`` (of those served), and ``bytes``, are counted there.
        patient: of a relay: what is not there yet will come.
    """

    def __init__(self, counts: Counter[str], *, patient: bool) -> None:
        self._counts = counts
        self._patient = patient
        self._lock = threading.Lock()
        self._held: dict[Hashable, Filling] = {}

    def put(self, place: Hashable, filling: Filling) -> Filling | None:
        """Hold a version in the place of what was there; the newest one that was held before.

        Args:
            place: of the version that it takes the place of, such as its segment.
            filling: the version.
        """
        with self._lock:
            before = max(self._held.values(), key=lambda held: held.manifest.order, default=None)
            self._held[place] = filling
        return before

    def keep(self, places: Collection[Hashable]) -> None:
        """Hold no others any more."""
        with self._lock:
            self._held = {place: filling for place, filling in self._held.items() if place in places}

    def clear(self) -> None:
        """Hold nothing."""
        self.keep(())

    def answer(self, header: Header) -> Answer:
        """The parts of the answer; ``None``: not yet.

        Raises:
            WireError: it is no request.
        """
        epoch, version, chunk = header.get("epoch", 0), header.get("version"), header.get("chunk")
        base = header.get("base", "")
        if header["type"] != "get" or type(epoch) is not int or type(version) is not int or type(chunk) is not int:
            raise WireError("bad_header", "a request is get {epoch, version, chunk}")
        if type(base) is not str:
            raise WireError("bad_header", "base is a checksum")
        with self._lock:
            held = [f for f in self._held.values() if f.manifest.order == (epoch, version)]
            orders = [f.manifest.order for f in self._held.values()]
        if not held:
            if self._patient and (epoch, version) > max(orders, default=(-1, -1)):
                return None
            self._count(gone=1)
            newest = max((number for _, number in orders), default=-1)
            return [pack_header({"type": "gone", "version": version, "newest": newest})]
        return self._chunk(held[0], chunk, base)

    def _chunk(self, filling: Filling, chunk: int, base: str) -> Answer:
        manifest = filling.manifest
        if not 0 <= chunk < len(manifest.chunks):
            raise WireError("bad_header", f"chunk {chunk} of {len(manifest.chunks)}")
        if not filling.done[chunk]:
            return None
        frames = filling.frames(chunk, base) if base else None
        told = {"type": "chunk", "version": manifest.version, "chunk": chunk}
        parts: list[Any] = [manifest.chunk(filling.data, chunk)]
        if frames is not None:
            told["base"], parts = base, list(frames)
        nbytes = sum(memoryview(part).nbytes for part in parts)
        self._count(served=1, differences=int(frames is not None), bytes=nbytes)
        return [pack_header(told), *parts]

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)
