"""Which ledger a server begins with, each written down in the run's journal from then on.

fresh ─► empty      --resume CHECKPOINT ─► the checkpoint's      --recover ─► the journal's, as the dead server left it
                                                                    └ unusable ─► the newest checkpoint's, or empty
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from async_rl.buffer import journal, journaled, replay
from async_rl.buffer.curriculum import Curriculum
from async_rl.buffer.journaled import JournaledLedger
from async_rl.buffer.records import Limits, Rules
from async_rl.buffer.stream import task_index
from async_rl.config import Config, RunConfig
from async_rl.errors import ConfigError, SchemaError
from async_rl.runfolder import RunFolder, read_json

JOURNAL = "journal"
"""Folder in the run folder."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What a server begins with."""

    ledger: JournaledLedger
    recovered: bool = False
    """It is the one of the server that died, and so are its clients."""
    disowned: str | None = None
    """The learner group that has steps which were lost with the journal; ``None``: there is none."""


def open_ledger(config: RunConfig, limits: Limits, out: Path, resume: Path | None, *, recover: bool) -> Opened:
    """The ledger of a server.

    Args:
        config: the run.
        limits: what model or environment say about groups.
        out: run folder.
        resume: checkpoint folder to go on from.
        recover: the server of this run has died, its clients live on.

    Raises:
        ConfigError: the checkpoint cannot be read, or the journal's folder not be written.
    """
    if not recover:
        ledger = make_ledger(config, limits, resume)
        journaled.start(ledger, out / JOURNAL)
        return Opened(ledger)
    try:
        return Opened(_recovered(config, limits, out), recovered=True)
    except ConfigError as error:
        print(f"async-rl: warning: {error}", flush=True)
    ledger, books = _newest(config, limits, out), read_json(out / "books.json")
    # Clients hold versions of the epoch that was lost: only those of a later one are newer to them.
    ledger.epoch = max(ledger.epoch, books["epoch"] if type(books.get("epoch")) is int else 0) + 1
    ledger.note("forgotten", True)
    journaled.start(ledger, out / JOURNAL)
    return Opened(ledger, disowned=str(books["group"]) if books.get("group") else None)


def make_ledger(config: RunConfig, limits: Limits, resume: Path | None) -> JournaledLedger:
    """A fresh ledger, or the one of a checkpoint.

    Raises:
        ConfigError: the checkpoint cannot be read.
    """
    ledger = JournaledLedger(*_parts(config, limits))
    if resume is not None:
        journal.restore(journal.load(resume), ledger, time.monotonic(), keep_open=False)
    return ledger


def _newest(config: RunConfig, limits: Limits, out: Path) -> JournaledLedger:
    """The ledger of the newest checkpoint that can be read; a fresh one without any.

    Raises:
        SchemaError: another version of this package wrote it.
    """
    for checkpoint in RunFolder(out).checkpoints():
        try:
            ledger = make_ledger(config, limits, checkpoint)
        except SchemaError:
            raise
        except ConfigError as error:
            print(f"async-rl: warning: {checkpoint} is passed over: {error}", flush=True)
            continue
        print(f"the run goes on from {checkpoint}; what came after it is made again", flush=True)
        return ledger
    print("the run begins again: there is no checkpoint to go on from", flush=True)
    return make_ledger(config, limits, None)


def _recovered(config: RunConfig, limits: Limits, out: Path) -> JournaledLedger:
    return replay.recover(out / JOURNAL, *_parts(config, limits), time.monotonic())


def _parts(config: RunConfig, limits: Limits) -> tuple[Rules, Callable[[int], int], Curriculum | None]:
    stream = partial(_task_of, config.seed, limits.num_tasks)
    has_curriculum = isinstance(config, Config) and config.task.curriculum
    return Rules.from_config(config, limits), stream, Curriculum(stream, config.seed) if has_curriculum else None


def _task_of(seed: int, num_tasks: int, ordinal: int) -> int:
    return task_index(seed, ordinal, num_tasks)
