"""The learner's end of a broadcast, for the tests of receivers: sends what a test gives it, from a thread."""

from __future__ import annotations

import secrets
import threading

import torch

from async_rl.weights.manifest import Manifest
from async_rl.weights.offer import Offer
from learner.broadcaster import Broadcaster, Sent


class Sender:
    """Rank 0 on the loopback.

    Args:
        deadline_s: for each version.
    """

    def __init__(self, deadline_s: float = 20.0) -> None:
        self.deadline_s = deadline_s
        self.broadcaster = Broadcaster("127.0.0.1", torch.device("cpu"), deadline_s)
        self.group = secrets.token_hex(4)
        self.sent: Sent | None = None
        self._thread: threading.Thread | None = None

    def offer(self, manifest: Manifest, rank: int = 1, world: int = 2) -> Offer:
        return Offer(
            epoch=manifest.epoch,
            version=manifest.version,
            store=self.broadcaster.terms["store"],
            group=self.group,
            rank=rank,
            world=world,
            deadline_s=self.deadline_s,
        )

    def begin(self, manifest: Manifest, data: memoryview | bytes | bytearray, world: int = 2) -> Offer:
        """Send these float32 bytes; the offer of rank 1."""
        pieces = [(0, torch.frombuffer(bytearray(data), dtype=torch.float32))]

        def send() -> None:
            self.sent = self.broadcaster.send(manifest, self.group, world, pieces)

        self._thread = threading.Thread(target=send)
        self._thread.start()
        return self.offer(manifest, world=world)

    def finish(self) -> Sent:
        """How it went; a group that failed is not used again."""
        assert self._thread is not None
        self._thread.join(self.deadline_s + 10)
        assert self.sent is not None
        if self.sent.error:
            self.group = secrets.token_hex(4)
        return self.sent
