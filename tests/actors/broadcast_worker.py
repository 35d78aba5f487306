"""A receiver in a process of its own, with a small module in place of a model: lines of JSON in, lines of JSON out."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch

from actors.engines.flat_weights import FlatWeights
from actors.engines.incoming import Incoming
from async_rl.errors import WeightsError
from async_rl.weights import offer as offers
from async_rl.weights.manifest import Manifest
from async_rl.weights.offer import Offer
from async_rl.weights.segment import SegmentReader

BLOCK = 1 << 16


def module() -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(16)])


def layout_of() -> list[tuple[str, tuple[int, ...], int, int]]:
    """Where the learner has each tensor, with a gap of 32 elements behind it."""
    layout, first = [], 0
    for name, parameter in module().named_parameters():
        layout.append((name, tuple(parameter.shape), first, parameter.numel()))
        first += parameter.numel() + 32
    return layout


def receive(weights: FlatWeights, incoming: Incoming, manifest: Manifest, offer: Offer, dies_at: int) -> str:
    weights.fit(manifest)
    incoming.meet(offer)
    blocks = 0

    def take(block: torch.Tensor) -> None:
        nonlocal blocks
        if blocks == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        blocks += 1
        incoming.take(block)

    return weights.receive(manifest, take)


def main() -> None:
    offers.blocks.__defaults__ = (BLOCK,)
    weights, incoming = FlatWeights(dict(module().named_parameters())), Incoming(torch.device("cpu"))
    reader = SegmentReader()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        said = json.loads(line)
        said["manifest"]["chunks"] = bytes.fromhex(said["manifest"]["chunks"])
        manifest, offer = Manifest.from_wire(said["manifest"]), Offer.from_wire(said["offer"])
        began, why = time.monotonic(), ""
        try:
            checksum = receive(weights, incoming, manifest, offer, said["dies_at"])
        except WeightsError as error:
            why = str(error)
            checksum = weights.load(manifest, reader.open(manifest))
        print(json.dumps({"checksum": checksum, "why": why, "seconds": time.monotonic() - began}), flush=True)
    incoming.close()
    reader.close()


if __name__ == "__main__":
    main()
