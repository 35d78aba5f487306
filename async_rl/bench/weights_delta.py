"""``bench weights --delta RUN``: the difference of two real versions, one step apart, in bfloat16, to one receiver.

    RUN: the two newest checkpoints ─► learner.bench.republishing ─► WeightServer(delta) ─► actors.bench.receiving
    beside the same receiver without --delta

The receiver has verified every chunk against the checksums of the whole before it says that it is done.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from async_rl.bench.figures import Figure
from async_rl.bench.weights_stage import CHUNK_BYTES, Stage
from async_rl.errors import ConfigError, WeightsError
from async_rl.runfolder import RunFolder

BAR = 0.15
_WARMUP = 2


def differences(*, run: Path, repeats: int) -> list[Figure]:
    """Measure.

    Args:
        run: folder of a run whose two newest checkpoints are one step apart (``checkpoint.every=1``).
        repeats: measurements of each figure.

    Raises:
        ConfigError: it has no such two.
    """
    newest_two(run)
    with ExitStack() as stack:
        stage = Stage(stack, 0, source=run, delta=True)
        told = stage.publisher.ask("describe")
        changed = stage.receiver("zmq", "--delta", "--host", "changed")
        full = stage.receiver("zmq", "--host", "full")
        shares: list[float] = []
        by_difference: list[float] = []

        def step() -> tuple[float, float]:
            """The older version to both, then the newer one; seconds of both receivers."""
            wire = stage.publish()[1].to_wire()
            for receiver in (changed, full):
                receiver.ask("fetch", manifest=wire)
            _, manifest = stage.publish()
            sent, made = stage.server.counts["bytes"], stage.server.counts["differences"]
            done = changed.ask("fetch", manifest=manifest.to_wire())
            shares.append((stage.server.counts["bytes"] - sent) / manifest.nbytes)
            by_difference.append((stage.server.counts["differences"] - made) / len(manifest.chunks))
            if done["checksum"] != manifest.checksum:
                raise WeightsError(f"{done['checksum']} came in place of {manifest.checksum}")
            return float(done["transfer_s"]), float(full.ask("fetch", manifest=manifest.to_wire())["transfer_s"])

        both = [step() for _ in range(_WARMUP + repeats)][_WARMUP:]
        seconds, full_s = (tuple(values) for values in zip(*both, strict=True))
    steps, nbytes = told["steps"], told["nbytes"]
    name = (
        f"{run.name}, step {steps[0]} to {steps[1]}, {nbytes / 1e6:,.3g} MB in bfloat16, {CHUNK_BYTES >> 20} MiB chunks"
    )
    return [
        Figure(f"{name}: bytes sent / payload", "×", tuple(shares[_WARMUP:]), bar=BAR, at_most=True),
        Figure(f"{name}: chunks sent as differences", "×", tuple(by_difference[_WARMUP:])),
        Figure(f"{name}: until it has verified", "s", seconds, "in full", full_s),
    ]


def newest_two(run: Path) -> list[Path]:
    """The two newest checkpoints of a run, the older one first.

    Raises:
        ConfigError: there are no two.
    """
    found = RunFolder(run).checkpoints()[:2]
    if len(found) < 2:
        raise ConfigError(
            f"{run} has no two checkpoints: make a run with --set checkpoint.every=1, which keeps the newest two"
        )
    return found[::-1]
