"""An adapter in a checkpoint, as peft writes and reads it.

adapter/adapter_model.safetensors   base_model.model.….lora_A.weight, float32; the checksum of its base in the metadata
adapter/adapter_config.json         rank, alpha, targets, and where the base lies

``peft.PeftModel.from_pretrained(base, "checkpoints/step_N/adapter")`` is the model, ``merge_and_unload()`` a plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from async_rl.adapter import FILE_PREFIX, published_name
from async_rl.base_checksum import base_of
from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.models import resolve_model
from learner.adapter import peft_config
from learner.checkpoint import ContractError
from learner.flat import FlatParameters, view_of

_FOLDER, _TENSORS, _BASE = "adapter", "adapter_model.safetensors", "async_rl_base"


def save_adapter(checkpoint: Path, tensors: Mapping[str, torch.Tensor], config: Config) -> None:
    """Write the adapter into a checkpoint.

    Args:
        checkpoint: its folder.
        tensors: float32, by the names that they have in the learner.
        config: of the run.
    """
    folder = checkpoint / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    named = {FILE_PREFIX + published_name(name): tensor for name, tensor in tensors.items()}
    save_file(named, folder / _TENSORS, metadata={"format": "pt", _BASE: base_of(config)})
    peft_config(config.lora, resolve_model(config.model.path).resolve()).save_pretrained(str(folder))


def load_adapter(checkpoint: Path, flat: FlatParameters, config: Config) -> None:
    """Give the policy the adapter of a checkpoint.

    Args:
        checkpoint: its folder.
        flat: of the policy, and perhaps of a critic.
        config: of the run.

    Raises:
        ConfigError: it is missing, damaged, or of another shape.
        ContractError: it was trained on another base.
    """
    file = checkpoint / _FOLDER / _TENSORS
    slots = {FILE_PREFIX + published_name(slot.name): slot for slot in flat.slots("policy")}
    try:
        with safe_open(file, "pt") as saved:
            _check_base(file, (saved.metadata() or {}).get(_BASE, ""), base_of(config))
            if set(saved.keys()) != set(slots):
                raise KeyError(f"its tensors are not those of rank {config.lora.rank} on {config.lora.targets}")
            for name, slot in slots.items():
                view_of(flat.data, slot).copy_(saved.get_tensor(name).view(slot.shape))
    except (OSError, SafetensorError, RuntimeError, KeyError) as error:
        raise ConfigError(f"{file} does not fit the adapter that is trained: {error}") from None
    flat.refresh()


def _check_base(file: Path, trained_on: str, base: str) -> None:
    if trained_on != base:
        raise ContractError(
            f"{file} was trained on a model with the checksum {trained_on!r}, model.path has {base!r} now: put "
            "the model back that the run began with"
        )
