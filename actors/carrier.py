"""Brings versions over the network for one receiver: one pull per host, and what is here is sent on to other hosts.

    manifest ─► HostShare: a copy of this host, or our turn to pull ─► Puller: from parents and the learner ─► bytes
                                                        │ base: what differences lead from
                                                        └──► Relay: what is here, or coming, goes to other hosts

A host that has no room for the copy in its shared memory is told once, and each receiver pulls into its own buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from actors.prepared import OwnBuffers
from actors.relay import Relay
from async_rl.curve import ClientKeys
from async_rl.weights.copies import Copy
from async_rl.weights.filling import Base, Filling
from async_rl.weights.manifest import Manifest
from async_rl.weights.puller import Puller
from async_rl.weights.share import HostShare
from async_rl.weights.tree import Parent

_PATIENCE = 2.0
"""Times ``stall_s``: a puller that is alive shows it once in ``stall_s``, whether chunks come or not."""


class Carrier:
    """Belongs to the receiver's thread; :meth:`keep` may be called from any.

    Args:
        address: gives the learner's chunk server; asked for each transfer.
        run_id: of the versions.
        stop: descriptor that becomes readable when a transfer must end at once.
        stall_s: longest time without a chunk before a transfer is taken up anew.
        keys: of a server that lets in only those whom it knows.
        relay: sends on what is here; it is closed with the carrier.
        delta: ask for the difference to the version that is held.
    """

    def __init__(
        self,
        address: Callable[[], str],
        run_id: str,
        stop: int,
        stall_s: float,
        keys: ClientKeys | None,
        *,
        relay: Relay | None,
        delta: bool,
    ) -> None:
        self._address = address
        self._relay, self._delta = relay, delta
        self._puller = Puller(address(), stop, stall_s, keys)
        self._share = HostShare(run_id, stop, _PATIENCE * stall_s, keep=relay is not None)
        self._buffers = OwnBuffers()
        self._told = False

    def bring(
        self,
        manifest: Manifest,
        parents: tuple[Parent, ...],
        base: Callable[[], Base | None],
        in_use: Callable[[], Sequence[memoryview]],
    ) -> tuple[Copy | None, memoryview]:
        """The bytes of a version, verified: the copy of this host, or a buffer of our own.

        Args:
            manifest: of the version.
            parents: whom each stripe is pulled from; empty: the learner.
            base: gives a version that stays where it is while this one is pulled.
            in_use: gives our own buffers that are read now.

        Raises:
            TransferError: it could not be fetched.
        """
        pulled: list[Filling] = []

        def pull(filling: Filling, pulse: Callable[[], None] = _nothing) -> None:
            pulled.append(filling)
            filling.lead_from(base() if self._delta else None)
            self._puller.address, self._puller.parents = self._address(), parents
            self._offer(filling)
            self._puller.fill(filling, pulse, self._relay.news if self._relay is not None else _nothing)

        try:
            copy = self._share.obtain(manifest, pull)
        except OSError as error:
            if not self._told:
                print(f"weights: no copy for all receivers of this host ({error}); each pulls its own", flush=True)
                self._told = True
        else:
            if not pulled:  # another process of this host has pulled it
                self._offer(Filling.whole(manifest, copy.data))
            return copy, copy.data
        filling = self._buffers.filling(manifest, in_use(), keep=self._relay is not None)
        pull(filling)
        return None, filling.data

    @property
    def received(self) -> dict[str, int]:
        """What came from whom so far, in transfers that failed, too: counts of :mod:`async_rl.weights.pull`."""
        return dict(self._puller.counts)

    def keep(self, orders: Collection[tuple[int, int]]) -> None:
        """Send on no other versions any more: their memory is about to be written over."""
        if self._relay is not None:
            self._relay.keep(orders)

    def end(self) -> None:
        """Last words of the receiver's thread."""
        self._puller.close()

    def close(self) -> None:
        """Send nothing on any more, and give back the memory of what nobody reads; after :meth:`end`."""
        if self._relay is not None:
            self._relay.close()
        self._share.close()
        self._buffers.clear()

    def _offer(self, filling: Filling) -> None:
        if self._relay is not None:
            self._relay.offer(filling)


def _nothing() -> None:
    """Nobody waits for this transfer."""
