"""A control learner's part of a checkpoint, complete enough to play from it.

flat vector ─► ROLE.safetensors for each role (``policy`` has the actor's state_dict, its normaliser included)
optimiser   ─► optimizer.safetensors        configuration and spaces ─► config.toml, spaces.json
memories    ─► NAME.safetensors
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from async_rl.config import ControlConfig, to_toml
from async_rl.control.checkpoint import CONFIG
from async_rl.control.spaces import Spaces
from async_rl.errors import ConfigError
from learner.control.method import Memory
from learner.flat import FlatParameters, view_of
from learner.optimizer import FlatAdamW

_OPTIMIZER = "optimizer.safetensors"


def save_networks(
    folder: Path, config: ControlConfig, spaces: Spaces, flat: FlatParameters, optimizer: FlatAdamW
) -> None:
    """Write everything into a checkpoint folder."""
    (folder / CONFIG).write_text(to_toml(config))
    spaces.write(folder)
    for role in flat.roles:
        save_file(flat.tensors(role), _file_of(folder, role))
    save_file(optimizer.state(), folder / _OPTIMIZER)


def load_networks(folder: Path, flat: FlatParameters, optimizer: FlatAdamW) -> None:
    """Fill the flat vector and the optimiser with what :func:`save_networks` wrote.

    Raises:
        ConfigError: it is missing, damaged, or of other networks.
    """
    for role in flat.roles:
        file = _file_of(folder, role)
        try:
            tensors = load_file(file)
            for slot in flat.slots(role):
                view_of(flat.data, slot).copy_(tensors[slot.name].view(slot.shape))
        except (OSError, SafetensorError, RuntimeError, KeyError) as error:
            raise ConfigError(
                f"{file} does not fit what is trained: {error}; resume with the config.toml of the run that wrote it"
            ) from None
    flat.refresh()
    try:
        optimizer.load_state(load_file(folder / _OPTIMIZER))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{folder / _OPTIMIZER} does not fit what is trained: {error}; it is damaged, or of a run with other "
            "networks or extensions"
        ) from None


def save_memories(folder: Path, memories: Mapping[str, Memory]) -> None:
    """Write what rank 0 remembers."""
    for name, memory in memories.items():
        save_file(memory.state(), _file_of(folder, name))


def load_memories(folder: Path, memories: Mapping[str, Memory]) -> None:
    """Let every rank go on with what :func:`save_memories` wrote.

    Raises:
        ConfigError: it is missing, damaged, or of something else.
    """
    for name, memory in memories.items():
        file = _file_of(folder, name)
        try:
            memory.load_state(load_file(file))
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise ConfigError(f"{file} does not fit what is trained: {error}; it is damaged") from None


def _file_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"
