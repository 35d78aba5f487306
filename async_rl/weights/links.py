"""The publisher's side of differences: from each version to the next, a chunk when it is first asked for.

    version v ◄──Link── v + 1 ◄──Link── v + 2          frames(chunk, base = v) at v + 2: two frames, v to v + 1 to v + 2

A version's slot is written again two versions later: what was asked for in time stays, and leads on from there; what
was not leads nowhere, and the whole chunk is sent. A base that is overwritten while it is read is found by its hash.
"""

from __future__ import annotations

import xxhash

from async_rl.weights.delta import encode
from async_rl.weights.filling import Filling, Frames

MOST_LINKS = 4
"""Versions back that differences lead from; each link's frames stay in memory."""
MOST_OF_CHUNK = 0.6
"""Differences that are longer than this share of a chunk are not sent, but the chunk."""


class Link:
    """From one published version to the next; belongs to one thread.

    Args:
        base: the older version.
        new: the newer one, of the same tensors.
    """

    def __init__(self, base: Filling, new: Filling) -> None:
        self._base, self._new = base, new
        self._itemsize = 4 if new.manifest.tensors[0].dtype == "float32" else 2
        self._made: dict[int, bytes] = {}
        """Empty where there is no use in it."""

    def frames(self, chunk: int, base: str) -> Frames | None:
        """See :meth:`async_rl.weights.filling.Filling.frames`."""
        before = self._base.frames(chunk, base)
        own = self._frame(chunk) if before is not None else b""
        if before is None or not own:
            return None
        frames = (*before, own)
        most = MOST_OF_CHUNK * self._new.manifest.chunk(self._new.data, chunk).nbytes
        return frames if sum(map(len, frames)) <= most else None

    @property
    def nbytes(self) -> int:
        """Bytes of all frames that were made."""
        return sum(map(len, self._made.values()))

    def cut(self, links: int) -> None:
        """Keep so many links, this one counted."""
        older = self._base.differences
        if links <= 1:
            self._base.differences = None
        elif isinstance(older, Link):
            older.cut(links - 1)

    def _frame(self, chunk: int) -> bytes:
        made = self._made.get(chunk)
        if made is None:
            made = self._made[chunk] = self._encode(chunk)
        return made

    def _encode(self, chunk: int) -> bytes:
        old, new = self._base.manifest, self._new.manifest
        base = old.chunk(self._base.data, chunk)
        frame = encode(base, new.chunk(self._new.data, chunk), self._itemsize)
        is_intact = xxhash.xxh3_64_intdigest(base) == old.chunks[chunk]
        return frame if is_intact else b""


def link(base: Filling, new: Filling) -> None:
    """Let differences lead from one published version to the next, where they are of the same tensors."""
    old, manifest = base.manifest, new.manifest
    same = (old.tensors, old.nbytes, old.chunk_bytes) == (manifest.tensors, manifest.nbytes, manifest.chunk_bytes)
    if same and manifest.tensors:
        made = Link(base, new)
        new.differences = made
        made.cut(MOST_LINKS)
