"""What a receiver hands out: a version whose bytes are proven, and the memory of its own where nothing is shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from async_rl.weights.copies import Copy
from async_rl.weights.filling import Base, Filling
from async_rl.weights.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A version whose bytes were verified against its manifest."""

    manifest: Manifest
    """Names the segment of this host, if ``data`` is one."""
    data: memoryview
    """The flat bytes [manifest.nbytes]: read-only shared memory of the learner, that it may write over, or a copy or a
    buffer that stays valid until :meth:`actors.receiver.Receiver.ready` hands out the next version."""
    transfer_s: float
    """From the start of the transfer until the last chunk was verified."""
    path: Literal["shm", "zmq"]
    copy: Copy | None = None
    """What holds ``data``, if it is shared by the receivers of this host."""
    received: Mapping[str, int] = field(default_factory=dict)
    """All that has come over the network so far, as :mod:`async_rl.weights.pull` counts it; empty: nothing has."""

    @property
    def base(self) -> Base:
        """What differences may lead from."""
        return Base(self.manifest.checksum, self.data)

    def release(self) -> None:
        """Nobody reads ``data`` any more."""
        if self.copy is not None:
            self.copy.release()


class OwnBuffers:
    """Private memory for the versions of one receiver, two at most; and what a transfer that broke has brought."""

    def __init__(self) -> None:
        self._buffers: list[memoryview] = []
        self._part: Filling | None = None

    def filling(self, manifest: Manifest, in_use: Sequence[memoryview], *, keep: bool) -> Filling:
        """A buffer that nobody reads, with what is there of this version.

        Args:
            manifest: of the version.
            in_use: what is read now.
            keep: see :class:`~async_rl.weights.filling.Filling`.
        """
        if self._part is None or not self._part.is_of(manifest) or any(self._part.data is data for data in in_use):
            self._part = Filling(manifest, self._free(manifest.nbytes, in_use), keep=keep)
        return self._part

    def clear(self) -> None:
        """Free all."""
        self._buffers.clear()
        self._part = None

    def _free(self, nbytes: int, in_use: Sequence[memoryview]) -> memoryview:
        self._buffers = [b for b in self._buffers if b.nbytes == nbytes or any(b is data for data in in_use)]
        for buffer in self._buffers:
            if not any(buffer is data for data in in_use):
                return buffer
        self._buffers.append(np.empty(nbytes, np.uint8).data)
        return self._buffers[-1]
