"""Where a life of the learner group begins: at the newest checkpoint that can be loaded, or afresh.

checkpoints/step_* ─► newest first ─► load on rank 0 ─► damaged: set aside with a warning, the one before
                                          └─► its step, name of this life ─► broadcast ─► the others load the same,
                                              which is brought to hosts that do not share the run folder
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from async_rl.buffer import journal
from async_rl.config import RunConfig
from async_rl.errors import ConfigError, SchemaError
from async_rl.runfolder import CHECKPOINT_FILES, MODEL_FILES
from async_rl.safetensors_files import read_entries
from learner.checkpoint import ContractError, TrainerState, fresh_state, read_state
from learner.domain import Domain
from learner.group import LearnerGroup
from learner.seal import check_seal
from learner.shipping import bring

FOLDER = "checkpoints"

Build = Callable[[Path | None], Domain]
"""Makes the domain of a checkpoint's folder, or a fresh one; :meth:`Domain.load` follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What this rank continues from."""

    state: TrainerState
    checkpoint: Path | None
    """``None``: nothing, the run begins."""
    life: str
    """Random name of this life of the group."""
    loaded: Domain | None
    """On rank 0 the domain with which the checkpoint was tried, if it was."""

    def domain(self, build: Build) -> Domain:
        """The domain as the checkpoint has it.

        Raises:
            ConfigError: it cannot be loaded here, although rank 0 could.
        """
        if self.loaded is not None:
            return self.loaded
        return load(self.checkpoint, build) if self.checkpoint is not None else build(None)


def find_start(config: RunConfig, out: Path, group: LearnerGroup, build: Build, own: Path | None = None) -> Start:
    """Choose on rank 0 and tell the others; errors as :func:`newest`.

    Args:
        config: the run.
        out: run folder.
        group: the ranks.
        build: see :data:`Build`.
        own: this host's own folder, where a checkpoint of another host is put; ``None``: ``out``.
    """
    checkpoint, loaded = newest(config, out, build) if group.rank == 0 else (None, None)
    step = int(group.broadcast_number(_step(checkpoint) if checkpoint is not None else -1.0))
    life = group.draw_name()
    if step < 0:
        return Start(state=fresh_state(config), checkpoint=None, life=life, loaded=None)
    folder = out / FOLDER / f"step_{step}"
    if group.hosts > 1:
        folder = bring(group, folder, own or out, life)
    return Start(state=read_state(folder, config), checkpoint=folder, life=life, loaded=loaded)


def newest(config: RunConfig, out: Path, build: Build) -> tuple[Path | None, Domain | None]:
    """The newest checkpoint that really loads, with its domain; damaged ones are set aside on the way.

    Of one that only all ranks can load together the tensor files are looked at, and no domain is made.

    Raises:
        ConfigError: they belong to another configuration, there are some and none can be loaded, or not even a new run
            could begin (a model that is gone): then no checkpoint is to blame.
    """
    problem = ""
    for folder in _folders(out):
        try:
            return folder, _tried(folder, config, build)
        except (ContractError, SchemaError):
            raise
        except ConfigError as error:
            fault = str(error)
        if not config.sharded:
            build(None)
        problem = problem or fault
        _set_aside(folder, fault)
    if problem:
        raise ConfigError(
            f"no checkpoint in {out / FOLDER} can be loaded; the newest: {problem}; restore one, or remove the folder "
            "to begin anew"
        )
    return None, None


def load(folder: Path, build: Build) -> Domain:
    """The domain of a checkpoint, all its tensors read.

    Raises:
        ConfigError: it is damaged, or of other models.
    """
    domain = build(folder)
    domain.load(folder)
    return domain


def _tried(folder: Path, config: RunConfig, build: Build) -> Domain | None:
    """The domain of a checkpoint; ``None``: it takes all ranks to load it, and its files are sound."""
    _check_files(folder)
    read_state(folder, config)
    journal.load(folder)
    domain = None
    if config.sharded:
        _check_tensors(folder)
    else:
        domain = load(folder, build)
    check_seal(folder)  # last: what is wrong with a file that cannot even be read is said better above
    return domain


def _folders(out: Path) -> Iterator[Path]:
    """Finished checkpoints, whole or not, newest first; what was being written is hidden under another name."""
    found = [p for p in (out / FOLDER).glob("step_*") if re.fullmatch(r"step_\d+", p.name) and p.is_dir()]
    return iter(sorted(found, key=_step, reverse=True))


def _step(folder: Path) -> float:
    return float(folder.name.removeprefix("step_"))


def _check_files(folder: Path) -> None:
    missing = [name for name in CHECKPOINT_FILES if not (folder / name).is_file()]
    if not any((folder / name).is_file() for name in MODEL_FILES):
        missing.append(" or ".join(MODEL_FILES))
    if missing:
        raise ConfigError(f"{folder} is no complete checkpoint: {', '.join(missing)} missing")


def _check_tensors(folder: Path) -> None:
    for file in sorted(folder.rglob("*.safetensors")):
        read_entries(file)


def _set_aside(folder: Path, fault: str) -> None:
    """Under a name that nobody takes for a checkpoint: it must neither be chosen again nor crowd out good ones."""
    aside = folder.with_name(f"damaged_{folder.name}_{os.getpid()}")
    try:
        folder.rename(aside)
        where = f"it is now {aside.name}"
    except OSError as error:
        where = f"it could not be renamed ({error.strerror})"
    print(f"async-rl: warning: checkpoint skipped, {where}: {fault}", file=sys.stderr, flush=True)
