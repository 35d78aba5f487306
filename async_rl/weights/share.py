"""One transfer per host: of all receivers that want a version, one pulls it, and the others map what it pulled.

    find ── a copy ──► verify ──► use                                  files: copies.py
     ▲ none              │ wrong: discard
     └──── wait ◄── take the turn ──► pull, verify ──► all find it     turn: turn.py
           until its holder is done, has died, or does not move

Each receiver verifies what it maps, so that whoever filled it need not be trusted. What a broken transfer has brought
its process keeps, and goes on with what is missing when the same version is wanted again.
"""

from __future__ import annotations

from collections.abc import Callable

from async_rl.errors import WeightsError
from async_rl.weights.copies import Copies, Copy
from async_rl.weights.filling import Filling
from async_rl.weights.leftovers import unlink_unused
from async_rl.weights.manifest import Manifest
from async_rl.weights.pull import TransferError
from async_rl.weights.turn import Turn

_ROUNDS = 1000
"""Each waits for another process to end a transfer, or finds a wrong copy."""

_RESUMED = ("no_progress", "unreachable")

Pull = Callable[[Filling, Callable[[], None]], None]
"""Fills what is missing with verified bytes, and calls the function as long as it moves."""


class HostShare:
    """A receiver's part in the copies of its host. Belongs to one thread.

    Args:
        run_id: of the versions.
        stop: descriptor that becomes readable when a wait must end at once.
        patience_s: who has the turn and does not move for so long loses it.
        keep: whether differences are kept, to be sent on to other hosts.
    """

    def __init__(self, run_id: str, stop: int, patience_s: float, *, keep: bool = False) -> None:
        self._copies = Copies(run_id)
        self._stop = stop
        self._patience_s = patience_s
        self._keep = keep
        self._begun = False
        self._part: tuple[Copy, Filling] | None = None
        """Of a transfer that broke."""

    def obtain(self, manifest: Manifest, pull: Pull) -> Copy:
        """A copy whose bytes this process has verified; release it after use.

        Raises:
            TransferError: as ``pull`` raises it, or ``closed``.
            OSError: this host's shared memory is full or cannot be used: pull into memory of your own.
        """
        if not self._begun:
            unlink_unused()  # what a host left on which all were killed
            self._begun = True
        if self._part is not None and not self._part[1].is_of(manifest):
            self._drop()
        for _ in range(_ROUNDS):
            if (copy := self._find(manifest)) is not None:
                self._drop()  # another process was faster
                return copy
            turn = Turn(self._copies.turn)
            try:
                if turn.take():
                    return self._find(manifest) or self._pull(manifest, pull, turn)
                if not turn.wait(self._stop, self._patience_s):
                    raise TransferError("closed", f"version {manifest.version}: the receiver was closed")
            finally:
                turn.close()
        raise TimeoutError(f"version {manifest.version} was not pulled by another process in {_ROUNDS} rounds")

    def close(self) -> None:
        """Remove what nobody on this host uses any more."""
        self._drop()
        self._copies.close()

    def _find(self, manifest: Manifest) -> Copy | None:
        copy = self._copies.find(manifest)
        if copy is None:
            return None
        try:
            manifest.verify(copy.data)
        except WeightsError as error:
            print(f"weights: {copy.path} is discarded and pulled again: {error}", flush=True)
            self._copies.discard(copy)
            return None
        return copy

    def _pull(self, manifest: Manifest, pull: Pull, turn: Turn) -> Copy:
        if self._part is None:
            copy = self._copies.begin(manifest, turn.pulse)
            self._part = copy, Filling(manifest, copy.data, keep=self._keep)
        copy, filling = self._part
        try:
            pull(filling, turn.pulse)
        except BaseException as error:
            if not isinstance(error, TransferError) or error.reason not in _RESUMED:
                self._drop()
            raise
        self._part = None
        return self._copies.finish(copy, manifest)

    def _drop(self) -> None:
        """Give up what a broken transfer has brought; the file is used for the next version."""
        if self._part is not None:
            self._part[0].release()
            self._part = None
