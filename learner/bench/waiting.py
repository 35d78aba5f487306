"""A learner whose step takes a given time and computes nothing: what is left of a run is how its parts work together.

    python -m learner.bench.waiting CONFIG.toml --out DIR --connect tcp://HOST:PORT --step-s 0.5 --slow-steps 2

Loop, shards, reduction over the ranks, publishing and checkpoints are those of every run.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from async_rl.config import Config, load_config
from async_rl.process import leave, run_guarded
from async_rl.wire import Frame, Header
from learner.domain import Trained
from learner.flat import FlatParameters, Slot
from learner.group import LearnerGroup
from learner.rank import Rank, main
from learner.shard import Shard

WIDTH = 64
"""Its one layer is so wide: what it publishes is small."""


class WaitingDomain:
    """A :class:`learner.domain.Domain` that takes its time.

    Args:
        group: the ranks.
        step_s: from the shard's arrival to the last reduction.
        slow_steps: the first so many take twice as long, so that the buffer fills.
    """

    def __init__(self, group: LearnerGroup, step_s: float, slow_steps: int = 0) -> None:
        self._group, self._step_s, self._slow_steps = group, step_s, slow_steps
        self.flat = FlatParameters({"policy": torch.nn.Linear(WIDTH, WIDTH)}, group.device, num_scalars=1)

    @property
    def published(self) -> tuple[Slot, ...]:
        """The layer."""
        return self.flat.slots("policy")

    def train(self, header: Header, frames: Sequence[Frame], step: int) -> Trained:
        """Read the shard, wait, reduce."""
        until = time.monotonic() + self._step_s * (2 if step < self._slow_steps else 1)
        shard = Shard.from_message(header, frames)
        threading.Event().wait(max(0.0, until - time.monotonic()))
        self.flat.zero_grad()
        self._group.all_reduce_flat(self.flat)
        self.flat.data[0] = step  # each version has other bytes
        return Trained({}, float(sum(batch.num_tokens for batch in shard.mini_batches)))

    def numbers(self) -> dict[str, float]:
        """None."""
        return {}

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        """Nothing to set."""

    def save(self, folder: Path) -> None:
        """Nothing is worth keeping: files that say so, because a checkpoint must have them."""
        (folder / "hf").mkdir()
        for name in ("optimizer.safetensors", "hf/config.json"):
            (folder / name).write_bytes(b"")

    def load(self, folder: Path) -> None:
        """Nothing was kept."""

    def offload(self) -> None:
        """Nothing lies on a device."""

    def restore(self) -> None:
        """Nothing to take."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a learner that waits instead of computing", add_help=False)
    parser.add_argument("--step-s", type=float, required=True, help="seconds that a step takes")
    parser.add_argument("--slow-steps", type=int, default=0, help="so many at first take twice as long")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest  # the others are those of every rank

    def build(config: Config, rank: Rank) -> WaitingDomain:
        """The domain of this rank."""
        return WaitingDomain(rank.group, own.step_s, own.slow_steps)

    run_guarded(lambda: main(load_config, build))
    leave()
