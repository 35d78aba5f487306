"""A version that is being filled: which chunks are there, proven, and what differences they were made of.

    puller ──take──► Filling ──answers of a relay, while it is still being filled──► other hosts
                        └── what a transfer that broke leaves behind: the next one asks for what is missing

One thread fills it; others may read ``done``, and the chunks that are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from async_rl.errors import WeightsError
from async_rl.weights.delta import apply
from async_rl.weights.manifest import Manifest, copy_checksum

Frames = tuple[bytes, ...]
"""Differences of one chunk, to be applied one after the other."""
MOST_FRAMES = 4
"""Of one chunk; each costs the time of a whole one, so that more are refused, whoever sends them."""


@dataclass(frozen=True, slots=True)
class Base:
    """A version that is held, from which a difference may lead to a newer one."""

    checksum: str
    """Of its manifest."""
    data: memoryview
    """Its bytes."""


class Differences(Protocol):
    """Leads from older versions to one; :class:`async_rl.weights.links.Link`."""

    def frames(self, chunk: int, base: str) -> Frames | None:
        """What makes this version's chunk of that of the version with checksum ``base``; ``None``: nothing."""


class Filling:
    """A version and the buffer that it is filled into.

    Args:
        manifest: of the version.
        data: bytes [manifest.nbytes], writable unless nothing is missing.
        keep: whether differences are kept, to be sent on.

    Raises:
        ValueError: the buffer has another size.
    """

    def __init__(self, manifest: Manifest, data: memoryview, *, keep: bool = False) -> None:
        if data.nbytes != manifest.nbytes:
            raise ValueError(f"a buffer of {data.nbytes} bytes for {manifest.nbytes}")
        self.manifest = manifest
        self.data = data
        self.done = bytearray(len(manifest.chunks))
        """1 for each chunk that is there and proven."""
        self.num_done = 0
        self.differences: Differences | None = None
        """Of the publisher's own versions; others have the frames that they got."""
        self.base = ""
        """Checksum of the version that the frames lead from."""
        self._base: memoryview | None = None
        self._keep = keep
        self._frames: dict[int, Frames] = {}

    @classmethod
    def whole(cls, manifest: Manifest, data: memoryview) -> Filling:
        """A version of which nothing is missing."""
        filling = cls(manifest, data)
        filling.done, filling.num_done = bytearray(b"\1" * len(filling.done)), len(filling.done)
        return filling

    @property
    def complete(self) -> bool:
        """Whether all chunks are there."""
        return self.num_done == len(self.done)

    def missing(self) -> list[int]:
        """Chunks that are not there, in order."""
        return [chunk for chunk, there in enumerate(self.done) if not there]

    def is_of(self, manifest: Manifest) -> bool:
        """Whether it is this version, with the same bytes."""
        mine = self.manifest
        return (mine.order, mine.checksum, mine.nbytes) == (manifest.order, manifest.checksum, manifest.nbytes)

    def lead_from(self, base: Base | None) -> None:
        """Differences from this version may be taken from now on; its bytes must stay until all is there."""
        usable = base if base is not None and base.data.nbytes == self.manifest.nbytes else None
        checksum = usable.checksum if usable else ""
        if checksum != self.base:
            self._frames = {}
        self.base, self._base = checksum, usable.data if usable else None

    def take(self, chunk: int, frames: Sequence[memoryview], *, differences: bool) -> bool:
        """Write a chunk; False if it is not what was published.

        Args:
            chunk: its index.
            frames: the bytes, or differences from the base.
            differences: which of them.
        """
        target = self.manifest.chunk(self.data, chunk)
        if differences:
            digest = self._apply(target, chunk, frames)
        else:
            right = len(frames) == 1 and frames[0].nbytes == target.nbytes
            digest = copy_checksum(target, frames[0]) if right else None
        if digest != self.manifest.chunks[chunk]:
            return False
        if differences and self._keep:
            self._frames[chunk] = tuple(bytes(frame) for frame in frames)
        self.num_done += not self.done[chunk]
        self.done[chunk] = 1
        if self.complete:
            self._base = None  # it may be written over, or given back, from now on
        return True

    def frames(self, chunk: int, base: str) -> Frames | None:
        """What leads to a chunk from the version with that checksum; ``None``: only the chunk itself does."""
        if base == self.manifest.checksum:
            return ()
        if self.differences is not None:
            return self.differences.frames(chunk, base)
        return self._frames.get(chunk) if base and base == self.base else None

    def _apply(self, target: memoryview, chunk: int, frames: Sequence[memoryview]) -> int | None:
        if self._base is None or len(frames) > MOST_FRAMES:
            return None
        target[:] = self.manifest.chunk(self._base, chunk)
        try:
            for frame in frames:
                apply(target, frame)
        except WeightsError:  # counted by who asked: it asks again, for the chunk itself
            return None
        return int(xxhash.xxh3_64_intdigest(target))
