"""Sends versions from rank 0's device to all engines at once, where the run says so (``weights.path = "broadcast"``).

    pieces of the flat vector ──cast──► block ──NCCL or gloo──► every engine
                                              └─ nobody later than weights.broadcast_s: those that missed it pull

The training loop waits meanwhile, for no longer than that. What is sent is what was published: receivers prove it by
the checksums of the manifest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from async_rl.config import RunConfig
from async_rl.errors import WeightsError
from async_rl.interfaces import interface_of, listen, use_interface
from async_rl.route import joined
from async_rl.weights.channel import Channel, device_name, forget, gather
from async_rl.weights.manifest import Manifest
from async_rl.weights.offer import blocks, meeting
from async_rl.weights.trust import sending_host
from learner.parameters import Piece

_KEPT = 64
"""Meetings that stay in the store: a receiver that was frozen hears at once that it is too late, and pulls."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """How a broadcast went."""

    seconds: float
    missing: tuple[int, ...] = ()
    """Ranks that did not come."""
    error: str = ""
    """What went wrong; empty: every receiver has all bytes."""


class Broadcaster:
    """Lives on rank 0, as long as this life of the learner group.

    Args:
        host: address of this host that the receivers reach.
        device: of rank 0.
        deadline_s: longest time for a version.
    """

    def __init__(self, host: str, device: torch.device, deadline_s: float) -> None:
        listening = listen(host)
        self._host, self._device, self._deadline_s = host, device, deadline_s
        self._address = joined(*listening.getsockname()[:2])
        self._store = dist.TCPStore(
            host,
            listening.getsockname()[1],
            None,
            True,
            timedelta(seconds=deadline_s),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self._channel: Channel | None = None
        self._meetings: deque[tuple[str, range]] = deque()
        """Keys and receivers of those that are in the store."""

    @property
    def terms(self) -> dict[str, str]:
        """What the server has to know: where the receivers meet, and which device it comes from."""
        return {"store": self._address, "device": device_name(self._device)}

    def send(self, manifest: Manifest, group: str, world: int, pieces: Iterable[Piece]) -> Sent:
        """Send a version.

        Args:
            manifest: what was published of ``pieces``.
            group: name of the communicator.
            world: its members.
            pieces: as for :meth:`learner.publisher.Publisher.publish_pieces`; all are read, whatever happens, because
                other ranks may take part in that.
        """
        began = time.monotonic()
        deadline, source = began + self._deadline_s, iter(pieces)
        missing: Sequence[int] = ()
        try:
            missing = self._gather(meeting(group, manifest.order), range(1, world), deadline)
            if missing:
                raise WeightsError(f"{len(missing)} of {world - 1} did not come in {self._deadline_s:g} s")
            channel = self._open(group, world, deadline)
            for block in in_blocks(manifest, source, self._device):
                channel.broadcast(block, deadline)
        except WeightsError as error:
            self._give_up()
            for _ in source:  # ranks that hold shards gather each piece together
                pass
            return Sent(seconds=time.monotonic() - began, missing=tuple(missing), error=str(error))
        return Sent(seconds=time.monotonic() - began)

    def close(self) -> None:
        """Give the communicator up."""
        self._give_up()

    def _gather(self, key: str, receivers: range, deadline: float) -> list[int]:
        self._meetings.append((key, receivers))
        if len(self._meetings) > _KEPT:
            forget(self._store, *self._meetings.popleft())
        return gather(self._store, key, receivers, deadline)

    def _open(self, group: str, world: int, deadline: float) -> Channel:
        if self._channel is None or self._channel.name != group:
            self._give_up()
            self._channel = Channel(self._store, group, 0, world, self._device, self._host, deadline)
        return self._channel

    def _give_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def in_blocks(manifest: Manifest, pieces: Iterator[Piece], device: torch.device) -> Iterator[torch.Tensor]:
    """The published bytes block by block, as the receivers expect them: uint8 ``[num_bytes]`` on the device.

    Args:
        manifest: of the version.
        pieces: of the flat vector in ascending order; what lies between two is zero. All of them are read.
        device: where blocks are made.
    """
    dtype = _DTYPES[manifest.tensors[0].dtype]
    piece = next(pieces, None)
    for begin, end in blocks(manifest.tensors, manifest.nbytes):
        first, last = begin // dtype.itemsize, end // dtype.itemsize
        block = torch.zeros(last - first, dtype=dtype, device=device)
        while piece is not None and piece[0] < last:
            start, values = piece[0], piece[1].detach().flatten()
            low, high = max(start, first), min(start + values.numel(), last)
            if low < high:
                block[low - first : high - first].copy_(values[low - start : high - start])
            if start + values.numel() > last:
                break  # goes on in the next block
            piece = next(pieces, None)
        yield block.view(torch.uint8)
    for _ in pieces:
        pass


def choose_interface(config: RunConfig) -> None:
    """Have NCCL use the interface on which the receivers are met; before the ranks' own group, which uses it, too.

    Raises:
        ConfigError: see :func:`async_rl.weights.trust.sending_host`.
    """
    if config.weights.path == "broadcast":
        use_interface(interface_of(sending_host(config)))


def open_broadcaster(config: RunConfig, device: torch.device) -> Broadcaster | None:
    """The broadcaster of this run, if it has one.

    Raises:
        ConfigError: see :func:`async_rl.weights.trust.sending_host`.
    """
    if config.weights.path != "broadcast":
        return None
    return Broadcaster(sending_host(config), device, config.weights.broadcast_s)
