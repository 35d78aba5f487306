"""Checkpoints: complete or absent, never half. A resumed learner continues bit by bit.

    .step_N (hidden, beside) ─► what Domain.save writes, trainer.json        rank 0
                             ─► ledger.json, groups.bin                      the server, asked by ``snapshot``
                             ─► seal.json ─► fsync of everything ─► its name, step_N
                             ─► older ones beyond ``keep`` are removed

A step that was saved before, as after a resume that was stopped before its first step, changes places with the new one:
there is no moment in which neither has the name.

The task stream and the seeds of actors belong to server and actors; what the learner draws at random follows from seed
and step, so there is no generator's state to keep.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError

from async_rl.config import RunConfig
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.form import Each, Fields, number, parse, text, whole
from async_rl.runfolder import CHECKPOINT_FILES
from learner.domain import Domain
from learner.seal import seal

_TRAINER = "trainer.json"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_STATE = Fields(
    {"step": whole, "trained": number, "contract": text, "numbers": Each(number)},
    needed=("step", "trained", "contract", "numbers"),
)


class CheckpointError(AsyncRLError):
    """A checkpoint could not be written; older ones are untouched."""


class ContractError(ConfigError):
    """A checkpoint is of a run with another contract: none of that run's fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What the learner continues from, beside the tensors."""

    step: int
    """Next step to train, which is the version of the weights."""
    trained: float
    """Tokens, or steps of environments, trained so far."""
    contract: str
    """:meth:`async_rl.config.RunConfig.contract_hash` of the run."""
    numbers: Mapping[str, float]
    """Of :meth:`learner.domain.Domain.numbers`."""


class Checkpoints:
    """The checkpoints of a run folder; written by rank 0.

    Args:
        out: run folder.
        keep: newest ones that stay.
    """

    def __init__(self, out: Path, keep: int) -> None:
        self._folder = out / "checkpoints"
        self._keep = keep

    def save(self, state: TrainerState, domain: Domain, snapshot: Callable[[Path], None]) -> Path:
        """Write ``step_{state.step}``.

        Args:
            state: the learner's counters.
            domain: models and optimiser.
            snapshot: has the server write its part into a folder; raises :class:`CheckpointError` when it cannot.

        Raises:
            CheckpointError: disk full, folder not writable, or the server's part failed. Nothing half-written stays.
        """
        final = self._folder / f"step_{state.step}"
        temporary = self._folder / f".step_{state.step}"
        try:
            self._remove_leftovers()
            temporary.mkdir(parents=True)
            domain.save(temporary)
            (temporary / _TRAINER).write_text(json.dumps(asdict(state), indent=1) + "\n")
            snapshot(temporary)
            missing = [name for name in CHECKPOINT_FILES if not (temporary / name).is_file()]
            if missing:
                raise CheckpointError(f"the checkpoint of step {state.step} lacks {', '.join(missing)}")
            seal(temporary)
            _fsync_tree(temporary)
            _name(temporary, final)
            self._remove_leftovers()
            _fsync(self._folder)
            self._prune()
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {state.step} could not be written to {final}: {error}; free some space or "
                "check the permissions (earlier checkpoints are untouched)"
            ) from error
        except CheckpointError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    def _remove_leftovers(self) -> None:
        for folder in self._folder.glob(".step_*"):
            shutil.rmtree(folder)

    def _prune(self) -> None:
        found = [(int(m[1]), p) for p in self._folder.glob("step_*") if (m := re.fullmatch(r"step_(\d+)", p.name))]
        for _, folder in sorted(found)[: -self._keep]:
            shutil.rmtree(folder)


def fresh_state(config: RunConfig) -> TrainerState:
    """Where a new run begins."""
    return TrainerState(step=0, trained=0.0, contract=config.contract_hash(), numbers={})


def read_state(checkpoint: Path, config: RunConfig) -> TrainerState:
    """The counters of a checkpoint.

    Raises:
        ConfigError: it is not complete.
        ContractError: it belongs to a run with another contract.
    """
    try:
        found = _STATE(parse((checkpoint / _TRAINER).read_bytes()))
    except OSError as error:
        raise ConfigError(f"{checkpoint} is no complete checkpoint: {_TRAINER}: {error}") from None
    if found is None or found["step"] < 0 or found["trained"] < 0:
        raise ConfigError(f"{checkpoint} is no complete checkpoint: {_TRAINER} is damaged")
    numbers = {name: float(value) for name, value in found["numbers"].items()}
    state = TrainerState(
        step=found["step"], trained=float(found["trained"]), contract=found["contract"], numbers=numbers
    )
    if state.contract != config.contract_hash():
        what = "environment, observations, networks" if config.is_control else "model, adapter, task, sampling"
        raise ContractError(
            f"{checkpoint} belongs to a run with another {what} or seed; resume with the config.toml of its run folder"
        )
    return state


def _name(begun: Path, final: Path) -> None:
    """Give a checkpoint its name; one that has it takes the name of the new one.

    On a file system that cannot exchange names (NFS) the one that is there stays: its tensors are the same.
    """
    if not final.exists():
        begun.rename(final)
    elif ctypes.CDLL(None, use_errno=True).renameat2(
        _AT_FDCWD, os.fsencode(begun), _AT_FDCWD, os.fsencode(final), _RENAME_EXCHANGE
    ):
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(number, os.strerror(number), str(final))


def _fsync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
