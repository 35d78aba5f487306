"""The policy of a finished or running control run, from its folder alone: for export, play, and as a teacher.

RUN/checkpoints/step_N/{config.toml, spaces.json, policy.safetensors} ─► load_actor ─► config, spaces, Actor
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from async_rl.config import ControlConfig, load_control
from async_rl.control.networks import Actor, build_actor
from async_rl.control.spaces import FILE, Spaces
from async_rl.errors import ConfigError

CONFIG = "config.toml"
POLICY = "policy.safetensors"
"""The actor's tensors under the names of its ``state_dict``."""


def checkpoint_folder(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest one of a run folder.

    Raises:
        ConfigError: there is none of a control run.
    """
    if (path / POLICY).is_file():
        return path
    steps = [
        (int(match[1]), folder)
        for folder in path.glob("checkpoints/step_*")
        if (match := re.fullmatch(r"step_(\d+)", folder.name)) and (folder / POLICY).is_file()
    ]
    if not steps:
        raise ConfigError(
            f"{path} is neither the folder of a control run with a checkpoint nor a checkpoint (a folder with {POLICY})"
        )
    return max(steps)[1]


def load_actor(path: Path) -> tuple[ControlConfig, Spaces, Actor]:
    """Build the actor of a run folder or a checkpoint folder, on the CPU, and fill in its weights and statistics.

    Raises:
        ConfigError: there is no checkpoint, it is damaged, or it is of other networks than its configuration says.
    """
    folder = checkpoint_folder(path)
    config = load_control(str(folder / CONFIG))
    spaces = Spaces.read(folder / FILE)
    actor = build_actor(config, spaces)
    _fill(actor, folder / POLICY)
    return config, spaces, actor.eval()


def _fill(actor: Actor, file: Path) -> None:
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    expected = {name: tuple(tensor.shape) for name, tensor in actor.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"{file} does not fit the {CONFIG} and {FILE} beside it: {name} is {_shape(found.get(name))} in the file "
            f"and {_shape(expected.get(name))} in the network ({len(wrong)} of {len(expected)} tensors differ)"
        )
    bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if bad:
        raise ConfigError(f"{file}: {bad[0]} holds numbers that are not finite; take an earlier checkpoint")
    actor.load_state_dict(tensors)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
