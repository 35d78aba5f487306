"""A learner that does nothing but publish, for ``bench weights``.

python -m learner.bench.publishing RUN_ID NBYTES CHUNK_BYTES     answers "publish" and "memcpy" on its input
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from async_rl.bench.weights_parts import answer_lines
from learner.publisher import Publisher

_TENSORS = 64


class Publishing:
    """A flat vector of random numbers, its publisher, and private memory of the same size, written once.

    Args:
        run_id: names the segments.
        nbytes: of a version, a multiple of 4.
        chunk_bytes: per checksum.
    """

    def __init__(self, run_id: str, nbytes: int, chunk_bytes: int) -> None:
        self._flat = torch.rand(nbytes // 4)
        ends = [len(self._flat) * i // _TENSORS for i in range(_TENSORS + 1)]
        layout = [(f"w{i}", (ends[i + 1] - ends[i],), ends[i], ends[i + 1] - ends[i]) for i in range(_TENSORS)]
        self._publisher = Publisher(run_id, layout, chunk_bytes)
        self._copy = np.ones(len(self._flat), np.float32)

    def publish(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The next version; each differs from the one before."""
        version = int(asked["version"])
        self._flat[version % len(self._flat)] += 1.0
        manifest = self._publisher.publish(self._flat, version, evaluated=False)
        return {"manifest": manifest.to_wire(), "publish_s": self._publisher.publish_s}

    def memcpy(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """One copy of the same bytes."""
        began = time.perf_counter()
        np.copyto(self._copy, self._flat.numpy())
        return {"seconds": time.perf_counter() - began}

    def close(self) -> None:
        """Remove the segments."""
        self._publisher.close()


def main() -> None:
    """The process."""
    with contextlib.closing(Publishing(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))) as publishing:
        answer_lines({"publish": publishing.publish, "memcpy": publishing.memcpy})


if __name__ == "__main__":
    main()
