"""The learner of a language model's run: groups of tokens in, updates of policy and critic.

shard ─► mini-batches ─► train_step (updater, mismatch check) ─► Trained
save  ─► hf/ (plain Hugging Face folder, float32 masters) or adapter/ (as peft has it), critic.safetensors (with one),
         optimizer.safetensors

The policy of a checkpoint is loaded from its ``hf/`` when the domain is built, since the folder says what model it is;
an adapter is put into its base, which is the start model, afterwards.
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
from learner.adapter import published
from learner.adapter_files import load_adapter, save_adapter
from learner.domain import Trained
from learner.flat import FlatParameters, Slot, view_of
from learner.mismatch import MismatchCheck
from learner.networks import load_networks
from learner.optimizer import FlatAdamW
from learner.rank import Rank
from learner.shard import Shard
from learner.step import train_step
from learner.together import CRITIC, OPTIMIZER, load_shards, save_settings, save_together
from learner.updater import Updater

SMALL_GROUP = 4


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
        """The policy, or its adapter; a critic lies behind it."""
        return published(self.flat.slots("policy"))

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
        """Write the models, or the adapter, and the optimiser's state."""
        if self._config.saves_together:
            save_together(folder, self.updater, lambda: self._save_alone(folder))
        else:
            self._save_alone(folder)
            save_optimizer(folder, self.updater)

    def _save_alone(self, folder: Path) -> None:
        """What rank 0 needs no other rank for."""
        if self._config.sharded:
            save_settings(model_folder(folder), self.updater.networks.policy)
            save_tokenizer(folder, self._tokenizer)
            return
        if self._config.lora.is_on:
            save_adapter(folder, self.updater.whole.tensors("policy"), self._config)
        else:
            save_model(folder, self.updater, self._tokenizer)
        save_critic(folder, self.updater)

    def load(self, folder: Path) -> None:
        """Give adapter and critic their parameters and the optimiser its moments back; a whole policy is there already.

        Raises:
            ConfigError: they are missing, damaged, or of another model.
        """
        if self._config.lora.is_on:
            load_adapter(folder, self.updater.whole, self._config)
        if self._config.sharded:
            load_shards(folder, self.updater)
        else:
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
    checkpoint = None if config.lora.is_on else rank.resume  # an adapter has its base where the run began
    source = model_folder(checkpoint) if checkpoint else resolve_model(config.model.path)
    # shards come from rank 0, and go to the devices layer by layer
    device = torch.device("cpu") if config.sharded else rank.group.device
    networks = load_networks(config, source, device, weights=not config.sharded or rank.is_leader)
    updater = Updater(config, networks, rank.group, rank.timer)
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
    """Write policy and tokenizer as Hugging Face has them."""
    from transformers.utils.logging import disable_progress_bar

    policy = updater.networks.policy
    tensors = updater.whole.tensors("policy")
    tensors |= {name: buffer.detach().cpu().clone() for name, buffer in _persistent_buffers(policy).items()}
    disable_progress_bar()
    with no_distributed_tensors():
        policy.save_pretrained(model_folder(folder), state_dict=tensors)
    save_tokenizer(folder, tokenizer)


def save_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Write it beside the policy."""
    try:
        tokenizer.save_pretrained(model_folder(folder))
    except Exception as error:  # its Rust part raises no OSError when the disk is full
        raise OSError(f"{model_folder(folder)}: the tokenizer could not be written: {error}") from error


def save_critic(checkpoint: Path, updater: Updater) -> None:
    """Write the critic, if there is one."""
    if updater.networks.critic is not None:
        save_file(updater.whole.tensors("critic"), checkpoint / CRITIC)


def save_optimizer(checkpoint: Path, updater: Updater) -> None:
    """Write the optimiser's moments, which are whole on this rank."""
    assert isinstance(updater.optimizer, FlatAdamW)
    save_file(updater.optimizer.state(), checkpoint / OPTIMIZER)


def load_tensors(checkpoint: Path, updater: Updater) -> None:
    """Read what :func:`save_critic` and :func:`save_optimizer` wrote.

    Raises:
        ConfigError: it is missing, damaged, or of another model.
    """
    if updater.networks.critic is not None:
        _load_critic(checkpoint / CRITIC, updater.whole)
    assert isinstance(updater.optimizer, FlatAdamW)
    try:
        updater.optimizer.load_state(load_file(checkpoint / OPTIMIZER))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{checkpoint / OPTIMIZER} does not fit what is trained: {error}; it is damaged, or of a run with another "
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
