"""Checkpoints: complete or absent, never half. A resumed learner continues bit by bit.

    .step_N (hidden, beside) ─► hf/, critic.safetensors (with a critic), optimizer.safetensors, trainer.json    rank 0
                             ─► ledger.json, groups.bin                       the server, asked by ``snapshot``
                             ─► fsync of everything ─► rename to step_N ─► older ones beyond ``keep`` are removed

``hf/`` is a plain Hugging Face folder with the float32 master weights. The learner draws no random numbers, so there is
no generator state to keep; the task stream and the sampling seeds belong to server and actors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.utils.logging import disable_progress_bar

from async_rl.config import Config
from async_rl.errors import AsyncRLError, ConfigError
from learner.flat import FlatParameters, view_of
from learner.updater import Updater

_OPTIMIZER = "optimizer.safetensors"
_CRITIC = "critic.safetensors"
_TRAINER = "trainer.json"


class CheckpointError(AsyncRLError):
    """A checkpoint could not be written; older ones are untouched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What the learner continues from, beside the tensors."""

    step: int
    """Next step to train, which is the version of the weights."""
    lr: float
    """Learning rate before warm-up."""
    kl_coef: float
    """β of the KL penalty."""
    trained_tokens: float
    """Sampled tokens trained so far."""
    skipped_in_row: int
    """Updates that were skipped just before."""
    contract: str
    """:meth:`async_rl.config.Config.contract_hash` of the run."""


class Checkpoints:
    """The checkpoints of a run folder; written by rank 0.

    Args:
        out: run folder.
        keep: newest ones that stay.
        tokenizer: saved beside the model.
    """

    def __init__(self, out: Path, keep: int, tokenizer: Any) -> None:
        self._folder = out / "checkpoints"
        self._keep = keep
        self._tokenizer = tokenizer

    def save(self, state: TrainerState, updater: Updater, snapshot: Callable[[Path], None]) -> Path:
        """Write ``step_{state.step}``.

        Args:
            state: the learner's counters.
            updater: model and optimiser.
            snapshot: has the server write its part into a folder; raises :class:`CheckpointError` when it cannot.

        Raises:
            CheckpointError: disk full, folder not writable, or the server's part failed. Nothing half-written stays.
        """
        final = self._folder / f"step_{state.step}"
        temporary = self._folder / f".step_{state.step}"
        try:
            self._remove_leftovers()
            temporary.mkdir(parents=True)
            _write(temporary, state, updater, self._tokenizer)
            snapshot(temporary)
            _fsync_tree(temporary)
            if final.exists():
                final.rename(self._folder / f".step_{state.step}.old")
            temporary.rename(final)
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


def model_folder(checkpoint: Path) -> Path:
    """Folder of the model in a checkpoint."""
    return checkpoint / "hf"


def read_state(checkpoint: Path, config: Config) -> TrainerState:
    """The counters of a checkpoint. Learning rate and β are the configuration's, unless a controller moved them.

    Raises:
        ConfigError: it is not complete, or belongs to a run with another model, task, sampling or seed.
    """
    try:
        state = TrainerState(**json.loads((checkpoint / _TRAINER).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{checkpoint} is no complete checkpoint: {_TRAINER}: {error}") from None
    if state.contract != config.contract_hash():
        raise ConfigError(
            f"{checkpoint} belongs to a run with another model, task, sampling or seed; resume with the config.toml "
            "of its run folder"
        )
    # what is constant may be changed on resume, and the checkpoint must not undo that
    if config.learner.lr_schedule == "constant":
        state = replace(state, lr=config.learner.lr)
    if config.algorithm.kl_controller == "fixed":
        state = replace(state, kl_coef=config.algorithm.kl_coef)
    return state


def load_tensors(checkpoint: Path, updater: Updater) -> None:
    """Give the critic its parameters and the optimiser its moments back; the policy was loaded from ``hf/``.

    Raises:
        ConfigError: they are missing, damaged, or of another model.
    """
    if updater.networks.critic is not None:
        _load_critic(checkpoint / _CRITIC, updater.flat)
    try:
        updater.optimizer.load_state(load_file(checkpoint / _OPTIMIZER))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{checkpoint / _OPTIMIZER} does not fit what is trained: {error}; it is damaged, or of a run with another "
            "algorithm.advantage or algorithm.critic (a critic is trained, too)"
        ) from None


def _load_critic(file: Path, flat: FlatParameters) -> None:
    try:
        tensors = load_file(file)
        for slot in flat.slots("critic"):
            view_of(flat.data, slot).copy_(tensors[slot.name].view(slot.shape))
    except (OSError, SafetensorError, RuntimeError, KeyError) as error:
        raise ConfigError(
            f"{file} does not fit the critic: {error}; resume with the algorithm.advantage and algorithm.critic of the "
            "run that wrote it"
        ) from None
    flat.refresh()


def _write(folder: Path, state: TrainerState, updater: Updater, tokenizer: Any) -> None:
    policy = updater.networks.policy
    tensors = updater.flat.tensors("policy")
    tensors |= {name: buffer.detach().cpu().clone() for name, buffer in _persistent_buffers(policy).items()}
    disable_progress_bar()
    policy.save_pretrained(model_folder(folder), state_dict=tensors)
    tokenizer.save_pretrained(model_folder(folder))
    if updater.networks.critic is not None:
        save_file(updater.flat.tensors("critic"), folder / _CRITIC)
    save_file(updater.optimizer.state(), folder / _OPTIMIZER)
    (folder / _TRAINER).write_text(json.dumps(asdict(state), indent=1) + "\n")


def _persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


def _fsync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
