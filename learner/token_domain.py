"""The learner of a language model's run: groups of tokens in, updates of policy and critic.

shard ─► mini-batches ─► train_step (updater, mismatch check) ─► Trained
save  ─► hf/ (plain Hugging Face folder, float32 masters), critic.safetensors (with a critic), optimizer.safetensors

The policy of a checkpoint is loaded from its ``hf/`` when the domain is built, since the folder says what model it is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.lean import no_distributed_tensors
from async_rl.models import load_tokenizer, resolve_model
from async_rl.wire import Frame, Header
from learner.domain import Trained
from learner.flat import FlatParameters, Slot, view_of
from learner.mismatch import MismatchCheck
from learner.networks import load_networks
from learner.rank import Rank
from learner.shard import Shard
from learner.step import train_step
from learner.updater import Updater

SMALL_GROUP = 4
_OPTIMIZER = "optimizer.safetensors"
_CRITIC = "critic.safetensors"


class TokenDomain:
    """Policy and critic with their optimiser; a :class:`learner.domain.Domain`.

    Args:
        config: the run.
        updater: the models.
        tokenizer: saved beside the policy.
        check: compares log-probabilities of actor and learner.
    """

    def __init__(self, config: Config, updater: Updater, tokenizer: Any, check: MismatchCheck) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._check = check
        self.updater = updater
        self.flat = updater.flat

    @property
    def published(self) -> tuple[Slot, ...]:
        """The policy; a critic lies behind it."""
        return self.flat.slots("policy")

    def train(self, header: Header, frames: Sequence[Frame], step: int) -> Trained:
        """All updates of ``step``; see :func:`learner.step.train_step`."""
        shard = Shard.from_message(header, frames)
        stats = train_step(self._config, self.updater, shard.mini_batches, step, self._check.check)
        return Trained(stats.metrics(), stats.tokens)

    def numbers(self) -> dict[str, float]:
        """Learning rate before warm-up, β, and the updates that were skipped just before."""
        updater = self.updater
        return {"lr": updater.lr, "kl_coef": updater.kl_coef, "skipped_in_row": float(updater.skipped_in_row)}

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        """Continue there; what is constant may be changed on resume, and the checkpoint must not undo that."""
        if self._config.learner.lr_schedule != "constant":
            self.updater.lr = numbers["lr"]
        if self._config.algorithm.kl_controller != "fixed":
            self.updater.kl_coef = numbers["kl_coef"]
        self.updater.skipped_in_row = int(numbers["skipped_in_row"])

    def save(self, folder: Path) -> None:
        """Write the models and the optimiser's state."""
        save_model(folder, self.updater, self._tokenizer)

    def load(self, folder: Path) -> None:
        """Give the critic its parameters and the optimiser its moments back; the policy is there already.

        Raises:
            ConfigError: they are missing, damaged, or of another model.
        """
        load_tensors(folder, self.updater)

    def offload(self) -> None:
        """Give the device's memory back."""
        self.updater.offload()

    def restore(self) -> None:
        """Take it again."""
        self.updater.restore()


def build(config: Config, rank: Rank) -> TokenDomain:
    """Load tokenizer and models: of the checkpoint, or the configured ones.

    Raises:
        ConfigError: a model cannot be loaded, or does not fit the others.
    """
    source = model_folder(rank.resume) if rank.resume else resolve_model(config.model.path)
    updater = Updater(config, load_networks(config, source, rank.group.device), rank.group, rank.timer)
    if rank.is_leader:
        warn(config)
    check = MismatchCheck(config, updater.networks, rank.group.device, warns=rank.is_leader)
    return TokenDomain(config, updater, load_tokenizer(source), check)


def warn(config: Config) -> None:
    """Say what is allowed but unlikely to be meant."""
    if config.algorithm.advantage in ("grpo", "dr_grpo", "rloo") and config.sampling.group_size < SMALL_GROUP:
        print(
            f"async-rl: warning: sampling.group_size = {config.sampling.group_size}: the mean of fewer than "
            f"{SMALL_GROUP} rewards is a noisy baseline; 8 or more learn better",
            file=sys.stderr,
            flush=True,
        )


def model_folder(checkpoint: Path) -> Path:
    """Folder of the model in a checkpoint."""
    return checkpoint / "hf"


def save_model(folder: Path, updater: Updater, tokenizer: Any) -> None:
    """Write policy and tokenizer as Hugging Face has them, the critic, and the optimiser's moments."""
    from transformers.utils.logging import disable_progress_bar

    policy = updater.networks.policy
    tensors = updater.flat.tensors("policy")
    tensors |= {name: buffer.detach().cpu().clone() for name, buffer in _persistent_buffers(policy).items()}
    disable_progress_bar()
    with no_distributed_tensors():
        policy.save_pretrained(model_folder(folder), state_dict=tensors)
    try:
        tokenizer.save_pretrained(model_folder(folder))
    except Exception as error:  # its Rust part raises no OSError when the disk is full
        raise OSError(f"{model_folder(folder)}: the tokenizer could not be written: {error}") from error
    if updater.networks.critic is not None:
        save_file(updater.flat.tensors("critic"), folder / _CRITIC)
    save_file(updater.optimizer.state(), folder / _OPTIMIZER)


def load_tensors(checkpoint: Path, updater: Updater) -> None:
    """Read what :func:`save_model` wrote beside the policy.

    Raises:
        ConfigError: it is missing, damaged, or of another model.
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


def _persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
