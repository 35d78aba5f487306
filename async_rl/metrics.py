"""Where the learner's numbers go: a JSON line a step, and in the background TensorBoard and Weights & Biases.

write(step, metrics) ─┬─► metrics.jsonl            at once, one line, survives a crash
                      ├─► out/tensorboard          own thread inside the writer
                      └─► queue ─► thread ─► wandb  never blocks the run: a full queue drops, a failure warns once
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from async_rl.buffer.line_file import LineFile
from async_rl.config import RunConfig
from async_rl.form import whole

Metrics = dict[str, float | None]
"""Numbers by name; None where there was nothing to measure."""

_QUEUE_LINES = 4096
_MOST_WAITING = 64 << 20
_CLOSE_TIMEOUT_S = 20.0


class Sink(Protocol):
    """A destination of metrics beside the file."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of a step."""

    def close(self) -> None:
        """Flush and end."""


class MetricsWriter:
    """Writes the numbers of each step; used by rank 0 of the learner.

    A resumed run continues the files: lines of steps that will be trained again are removed first.

    Args:
        out: run folder.
        config: the run's configuration (``log`` decides on the sinks).
        start_step: first step that will be written; older lines of this step or later are dropped.
    """

    def __init__(self, out: Path, config: RunConfig, start_step: int = 0) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(out / "metrics.jsonl", most_waiting=_MOST_WAITING)
        self._full = False
        self._try(lambda: self._file.keep(lambda row: _is_before(row, start_step)))
        self._start_step = start_step
        self._sinks: list[_Guarded] = []
        if config.log.tensorboard:
            self._sinks.append(_Guarded("TensorBoard", lambda: _TensorBoard(out / "tensorboard", start_step)))
        if config.log.wandb:
            self._sinks.append(_Guarded("wandb", lambda: _Background("wandb", lambda: _Wandb(out, config))))

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Append a line with the metrics; None and what is not finite become null; None goes to no other sink.

        The line begins with ``step``, ``time`` (epoch seconds) and ``session``: the first step after the last start or
        resume, so that the pause between two sessions is not taken for work.
        """
        row: dict[str, float | None] = {"step": step, "time": round(time.time(), 3), "session": self._start_step}
        measured = {k: v for k, v in metrics.items() if v is not None}
        row |= {k: float(v) if v is not None and math.isfinite(v) else None for k, v in metrics.items()}
        self._file.append(json.dumps(row))
        self._try(self._file.write)
        for sink in self._sinks:
            sink.write(step, measured)

    def close(self) -> None:
        """Flush everything; waits a bounded time for the sinks."""
        self._try(self._file.write)
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def _try(self, action: Callable[[], None]) -> None:
        """Lines that the disk does not take wait in memory; that is said once, and once when they are written."""
        try:
            action()
        except OSError as error:
            if not self._full:
                print(
                    f"async-rl: warning: metrics.jsonl cannot be written: {error}; its lines wait in memory",
                    file=sys.stderr,
                    flush=True,
                )
            self._full = True
            return
        if self._full:
            print("metrics.jsonl can be written again: all that waited is in it", file=sys.stderr, flush=True)
        self._full = False


def _is_before(row: Mapping[str, Any], step: int) -> bool:
    found = whole(row.get("step"))
    return found is not None and found < step


class _Guarded:
    """A sink whose failure becomes one warning: logging is not worth a run."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._name = name
        self._sink: Sink | None = None
        self._try(lambda: setattr(self, "_sink", make()))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._sink is not None:
            sink = self._sink
            self._try(lambda: sink.write(step, metrics))

    def close(self) -> None:
        if self._sink is not None:
            self._try(self._sink.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._sink = None
            print(
                f"async-rl: warning: {self._name} is off for the rest of the run: {error!r}",
                file=sys.stderr,
                flush=True,
            )


class _TensorBoard:
    """Scalars in ``out/tensorboard``; a resumed run hides what it will write again."""

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = start_step if start_step > 0 else None
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=30)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A wandb run under ``out/wandb``; offline unless ``WANDB_API_KEY`` (or ``WANDB_MODE``) says otherwise."""

    def __init__(self, out: Path, config: RunConfig) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run = wandb.init(
            project=config.log.wandb_project,
            name=config.name,
            dir=str(out),
            config=config.model_dump(),
            mode=mode,
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=60, disable_git=True, save_code=False, x_disable_stats=True
            ),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Background:
    """Runs a sink in a daemon thread behind a bounded queue; lines that do not fit are dropped and counted."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._name = name
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_QUEUE_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, args=(make,), name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._dropped += self._queue.qsize()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive() or self._dropped:
            raise TimeoutError(f"it did not keep up ({self._dropped} lines dropped); metrics.jsonl is complete")

    def _work(self, make: Callable[[], Sink]) -> None:
        sink = _Guarded(self._name, make)
        for item in iter(self._queue.get, None):
            sink.write(*item)
        sink.close()
