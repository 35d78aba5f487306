"""The publisher's side of differences: from each version to the next, a chunk when it is first asked for.

    version v ◄──Link── v + 1 ◄──Link── v + 2          frames(chunk, base = v) at v + 2: two frames, v to v + 1 to v + 2

A version's slot is written again two versions later: what was asked for in time stays, and leads on from there; what
was not leads nowhere, and the whole chunk is sent. Bytes that are overwritten while they are read are found by their
hash. Frames of a few versions stay in memory: at most 0.6 of a version for each, and what is longer is not kept.
"""

from __future__ import annotations

import threading

import xxhash

from async_rl.weights.delta import encode
from async_rl.weights.filling import MOST_FRAMES, Filling, Frames
from async_rl.weights.manifest import Manifest

MOST_OF_CHUNK = 0.6
"""Differences that are longer than this share of a chunk are not sent, but the chunk."""
_LOCKS = 16


class Link:
    """From one published version to the next. Any thread may ask; each chunk is encoded once.

    Args:
        base: the older version.
        new: the newer one, of the same tensors.
    """

    def __init__(self, base: Filling, new: Filling) -> None:
        self._base, self._new = base, new
        self._itemsize = _itemsize(new.manifest)
        self._made: dict[int, bytes] = {}
        """Empty where there is no use in it."""
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        """Chunk i is encoded by who holds lock i mod 16."""

    def frames(self, chunk: int, base: str) -> Frames | None:
        """See :meth:`async_rl.weights.filling.Filling.frames`."""
        before = self._base.frames(chunk, base)
        own = self._frame(chunk) if before is not None else b""
        if before is None or not own:
            return None
        frames = (*before, own)
        return frames if sum(map(len, frames)) <= self._most(chunk) else None

    def cut(self, links: int) -> None:
        """Keep so many links, this one counted."""
        older = self._base.differences
        if links <= 1:
            self._base.differences = None
        elif isinstance(older, Link):
            older.cut(links - 1)

    def _frame(self, chunk: int) -> bytes:
        with self._locks[chunk % _LOCKS]:
            made = self._made.get(chunk)
            if made is None:
                made = self._made[chunk] = self._encode(chunk)
        return made

    def _encode(self, chunk: int) -> bytes:
        sides = [(side.manifest.chunk(side.data, chunk), side.manifest) for side in (self._base, self._new)]
        frame = encode(sides[0][0], sides[1][0], self._itemsize)
        are_intact = all(xxhash.xxh3_64_intdigest(data) == manifest.chunks[chunk] for data, manifest in sides)
        return frame if are_intact and len(frame) <= self._most(chunk) else b""

    def _most(self, chunk: int) -> float:
        return MOST_OF_CHUNK * self._new.manifest.chunk(self._new.data, chunk).nbytes


def link(base: Filling, new: Filling) -> None:
    """Let differences lead from one published version to the next, where they are of the same tensors."""
    old, manifest = base.manifest, new.manifest
    same = (old.tensors, old.nbytes, old.chunk_bytes) == (manifest.tensors, manifest.nbytes, manifest.chunk_bytes)
    if same and not (manifest.nbytes % _itemsize(manifest) or manifest.chunk_bytes % _itemsize(manifest)):
        made = Link(base, new)
        new.differences = made
        made.cut(MOST_FRAMES)


def _itemsize(manifest: Manifest) -> int:
    """Bytes of a number: 4 where all are float32."""
    return 4 if all(tensor.dtype == "float32" for tensor in manifest.tensors) else 2
