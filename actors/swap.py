"""Weight versions from announcement to proof: fetched by the receiver, committed between two steps, reported as live.

version ─► announce ─► receiver (its thread) ─► commit ─► engine.load_weights ─► live(version, checksum)
              ▲                                   │               │ refused
              │                                   └─ not yet: kept until its holder is drained, or a newer one comes
              └──────────────────── the newest once more ◄────────┘
offer, version ─► commit ─► engine.receive_weights: at once, the learner waits ─► live, or missed ─► receiver
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from actors.engines.base import BroadcastEngine
from actors.prepared import Prepared
from actors.receiver import Receiver
from async_rl.client import Client
from async_rl.errors import WeightsError
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest
from async_rl.weights.offer import Offer

MAX_COMMIT_FAILURES = 5
"""So many weight versions in a row whose read-back failed mean that the engine cannot hold them."""


class Holder(Protocol):
    """What holds weights: an engine, or a policy. See :class:`actors.engines.base.Engine`."""

    @property
    def version(self) -> int:
        """Version that it holds; -1 before the first."""

    @property
    def proven(self) -> bool:
        """Whether it may sample."""

    @property
    def last_pause_s(self) -> float:
        """Seconds for which the last swap stopped it."""

    def load_weights(self, manifest: Manifest, data: memoryview) -> str:
        """Swap in a version; the checksum of what is held then.

        Raises:
            WeightsError: it does not fit, or the read-back does not match.
        """


class WeightSwap:
    """Keeps a holder at the newest version.

    Args:
        counts: ``weights_refused`` and ``broadcasts_missed`` are counted there.
        name: of the process, for what it prints.
    """

    def __init__(
        self, holder: Holder, receiver: Receiver, client: Client, timer: StateTimer, counts: Counter[str], name: str
    ) -> None:
        self._holder, self._receiver, self._client, self._timer = holder, receiver, client, timer
        self._counts, self._name = counts, name
        self._newest: Manifest | None = None
        self._kept: Prepared | None = None
        self._offer: Offer | None = None
        self._awaited: tuple[Manifest, Offer] | None = None
        """What is to be received by broadcast."""
        self._held = (-1, -1)
        """Epoch and version of what was committed."""
        self._failures = 0

    @property
    def behind(self) -> bool:
        """Whether it waits for weights: nothing is proven, or a newer version was announced than it holds."""
        return not self._holder.proven or (self._newest is not None and self._newest.order > self._held)

    @property
    def is_due(self) -> bool:
        """Whether a prepared version waits for its commit."""
        return self._kept is not None

    def announce(self, manifest: Manifest) -> None:
        """A version was published; after a restart of the learner its number may be lower than that of the last."""
        if self._newest is None or manifest.order >= self._newest.order:
            self._newest, self._awaited = manifest, None
            offer = self._offer
            if offer is not None and offer.order == manifest.order and isinstance(self._holder, BroadcastEngine):
                self._awaited = manifest, offer
            else:
                self._receiver.fetch(manifest)

    def expect(self, offer: Offer) -> None:
        """The version that is announced next comes by broadcast."""
        self._offer = offer

    def commit(self, may_swap: Callable[[], bool] = lambda: True) -> None:
        """Swap in what is broadcast now or is prepared, if anything. Until it is proven, nothing may be sampled.

        Args:
            may_swap: asked when there is one; it is kept until this is true.

        Raises:
            WeightsError: the holder cannot hold what is published, again and again.
        """
        self._receive()
        self._kept = self._receiver.ready() or self._kept
        if self._kept is not None and self._kept.manifest.order < self._held:
            self._kept = None  # pulled while a newer one was broadcast
        if self._kept is None or not may_swap():
            return
        prepared, self._kept = self._kept, None
        began = time.monotonic()
        with self._timer.during("paused"):
            try:
                checksum = self._holder.load_weights(prepared.manifest, prepared.data)
            except WeightsError as error:
                self._refuse(prepared, error)
                return
        self._hold(
            prepared.manifest,
            checksum,
            transfer_s=prepared.transfer_s,
            commit_s=time.monotonic() - began,
            received=dict(prepared.received),
        )

    def _receive(self) -> None:
        """Take part in the broadcast that is due, or have its version pulled."""
        if self._awaited is None or not isinstance(self._holder, BroadcastEngine):
            return
        (manifest, offer), self._awaited = self._awaited, None
        began = time.monotonic()
        with self._timer.during("paused"):
            try:
                checksum = self._holder.receive_weights(manifest, offer)
            except WeightsError as error:
                self._counts["broadcasts_missed"] += 1
                print(f"{self._name}: version {manifest.version} is pulled: {error}", flush=True)
                self._receiver.fetch(manifest)
                return
        took_s = time.monotonic() - began  # it is loaded as it comes
        self._hold(manifest, checksum, transfer_s=took_s, commit_s=took_s, broadcast=True)

    def _hold(self, manifest: Manifest, checksum: str, **facts: object) -> None:
        """A version is held, proven."""
        self._failures = 0
        self._held = manifest.order
        self._client.send(
            "live",
            epoch=manifest.epoch,
            version=manifest.version,
            checksum=checksum,
            pause_s=self._holder.last_pause_s,
            **facts,
        )

    def _refuse(self, prepared: Prepared, error: WeightsError) -> None:
        """The holder did not take what was published (a slot overwritten meanwhile, or a fault): fetch the newest.

        It goes on with the version before only if it still holds that one, proven.
        """
        self._counts["weights_refused"] += 1
        self._failures += _is_intact(prepared)  # a learner that is faster than our copies is no fault
        print(f"{self._name}: {error}", flush=True)
        if self._failures >= MAX_COMMIT_FAILURES:
            raise WeightsError(f"{self._failures} versions in a row could not be committed; the last: {error}")
        if self._newest is not None:
            self._receiver.fetch(self._newest)


def _is_intact(prepared: Prepared) -> bool:
    """Whether the prepared bytes are still those that were published."""
    try:
        prepared.manifest.verify(prepared.data)
    except WeightsError:
        return False
    return True
