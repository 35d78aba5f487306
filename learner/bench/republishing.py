"""A learner that publishes versions of a run that has ended, for ``bench weights --delta``.

python -m learner.bench.republishing RUN_ID RUN_FOLDER CHUNK_BYTES     answers "describe" and "publish" on its input
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from async_rl.bench.weights_delta import newest_two
from async_rl.bench.weights_parts import answer_lines
from async_rl.errors import ConfigError
from async_rl.runfolder import model_folder
from learner.publisher import Layout, Publisher
from learner.seal import check_seal


class Republishing:
    """The two newest checkpoints of a run, published in turns.

    Args:
        run_id: names the segments.
        run: folder of the run.
        chunk_bytes: per checksum.

    Raises:
        ConfigError: the run has no two of them, of the same tensors, as they were saved.
    """

    def __init__(self, run_id: str, run: Path, chunk_bytes: int) -> None:
        folders = newest_two(run)
        for folder in folders:
            check_seal(folder)
        loaded = [_flat(folder) for folder in folders]
        layout = loaded[0][1]
        if layout != loaded[1][1]:
            raise ConfigError(f"{folders[0]} and {folders[1]} are not of the same tensors")
        self._steps = [_step(folder) for folder in folders]
        self._flats = [flat for flat, _ in loaded]
        self._publisher = Publisher(run_id, layout, chunk_bytes, "bfloat16")

    def describe(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """What is published."""
        return {"steps": self._steps, "nbytes": self._publisher.nbytes}

    def publish(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The next version: even ones are the older checkpoint, odd ones the newer."""
        version = int(asked["version"])
        manifest = self._publisher.publish(self._flats[version % 2], version, evaluated=False)
        return {"manifest": manifest.to_wire(), "publish_s": self._publisher.publish_s}

    def close(self) -> None:
        """Remove the segments."""
        self._publisher.close()


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])


def _flat(checkpoint: Path) -> tuple[torch.Tensor, Layout]:
    """Float32 [num_flat] and where each tensor lies in it."""
    inner = model_folder(checkpoint)
    files = sorted(inner.glob("policy.safetensors" if inner == checkpoint else "*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    layout, first = [], 0
    for name in sorted(tensors):
        tensor = tensors[name]
        layout.append((name, tuple(tensor.shape), first, tensor.numel()))
        first += tensor.numel()
    return torch.cat([tensors[name].float().flatten() for name in sorted(tensors)]), layout


def main() -> None:
    """The process."""
    try:
        made = Republishing(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    except ConfigError as error:
        sys.exit(str(error))
    with contextlib.closing(made) as republishing:
        answer_lines({"describe": republishing.describe, "publish": republishing.publish})


if __name__ == "__main__":
    main()
