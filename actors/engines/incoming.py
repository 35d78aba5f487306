"""A worker's end of the broadcast: its place among the receivers, kept from version to version.

    offer ─► meet: come to the store, wait for the learner's go, open the channel ─► take(block), take(block), ...

Until :meth:`Incoming.meet` returns nothing of the engine has changed, and who fails there goes on with what it has.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from async_rl.errors import WeightsError
from async_rl.route import route_to
from async_rl.weights.channel import Channel, come, reach
from async_rl.weights.offer import Offer

PATIENCE_S = 2.0
"""A receiver gives up so much later than the learner, whose word it is that a version is not sent."""


class Incoming:
    """Lives where the weights are: in the embedded engine, or in vLLM's worker.

    Args:
        device: on which blocks are wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._address = ""
        self._store: dist.Store | None = None
        self._channel: Channel | None = None
        self._deadline = 0.0

    def meet(self, offer: Offer, worker: int = 0) -> None:
        """Come together with the learner and the other receivers.

        Args:
            offer: of the version.
            worker: which one of its engine this is.

        Raises:
            WeightsError: it does not begin, or not in time.
        """
        self._deadline = time.monotonic() + offer.deadline_s + PATIENCE_S
        rank = offer.rank + worker
        try:
            store = self._reach(offer.store)
            come(store, offer.key, rank, self._deadline)
            if self._channel is None or self._channel.name != offer.group:
                self._close_channel()
                here, _ = route_to(offer.store)
                self._channel = Channel(store, offer.group, rank, offer.world, self._device, here, self._deadline)
        except WeightsError:
            self.close()
            raise

    def take(self, block: torch.Tensor) -> None:
        """Receive the next block.

        Args:
            block: uint8, contiguous, on the device; it is written over.

        Raises:
            WeightsError: not in time, or the learner or another receiver is gone.
        """
        if self._channel is None:
            raise WeightsError("a block is awaited without a meeting")
        try:
            self._channel.broadcast(block, self._deadline)
        except WeightsError:
            self.close()
            raise

    def close(self) -> None:
        """Leave; the next meeting begins afresh."""
        self._close_channel()
        self._store, self._address = None, ""

    def _reach(self, address: str) -> dist.Store:
        if self._store is None or address != self._address:
            self.close()
            self._store, self._address = reach(address, self._deadline), address
        return self._store

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
