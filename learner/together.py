"""A checkpoint of a model whose tensors or moments are spread over the ranks: all of them write it, nobody gathers it.

    rank 0                                           the others, in :func:`help_saving`
    a try begins ──────────────────────────────────► save(the same folder)
    hf/config.json, tokenizer, empty files
    vote: could they be made? ◄────────────────────► vote
    my parts ─► the files                            my parts ─► the files
    vote: is all written? ◄────────────────────────► vote
    ... once more, or the checkpoint gets its name
    over ──────────────────────────────────────────► go on

The files are those of any other checkpoint (:mod:`learner.token_domain`), whatever the number of ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from async_rl.errors import ConfigError
from async_rl.safetensors_files import read_entries
from learner.group import LearnerGroup
from learner.optimizer import MOMENTS
from learner.parts import create, read_part, write_parts

if TYPE_CHECKING:
    from learner.sharded import ShardedAdamW, ShardedParameters
    from learner.updater import Updater

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
CRITIC = "critic.safetensors"


def save_together(folder: Path, updater: Updater, begin: Callable[[], None]) -> None:
    """One try to write a checkpoint; every rank calls it.

    Args:
        folder: of the checkpoint, on rank 0's host; other hosts do not look at it.
        updater: the models.
        begin: on rank 0, writes what needs no other rank.

    Raises:
        OSError: on rank 0, if it or another rank could not write.
    """
    group = updater.group
    if group.rank == 0:
        group.broadcast_bytes(os.fsencode(folder))
    fault = _fault_of(lambda: _begin(folder, updater, begin)) if group.rank == 0 else None
    if group.all_agree(fault is None):
        fault = _fault_of(lambda: _write_parts(folder, updater))
        if group.all_agree(fault is None):
            return
    if group.rank == 0:
        raise OSError(str(fault or "another rank could not write its part of it, see its log")) from fault
    if fault is not None:
        print(f"async-rl: warning: rank {group.rank} could not write its part: {fault}", file=sys.stderr, flush=True)


def help_saving(group: LearnerGroup, save: Callable[[Path], None]) -> None:
    """What the other ranks do while rank 0 writes a checkpoint, tries included."""
    while folder := group.broadcast_bytes(b""):
        save(Path(os.fsdecode(folder)))


def stop_helping(group: LearnerGroup) -> None:
    """Rank 0 is done with a checkpoint, written or not."""
    group.broadcast_bytes(b"")


def save_settings(folder: Path, policy: Any) -> None:
    """A model's ``config.json`` and ``generation_config.json``, as it would save them beside float32 tensors."""
    policy.config.architectures = [type(policy).__name__]
    policy.config.dtype = torch.float32
    policy.config.save_pretrained(folder)
    if policy.can_generate():
        policy.generation_config.save_pretrained(folder)


def load_shards(checkpoint: Path, updater: Updater) -> None:
    """Read this rank's part of a checkpoint, the policy excepted.

    Raises:
        ConfigError: it is missing, damaged, or of other models.
    """
    parameters, optimizer = _shards_of(updater)
    if "critic" in parameters.roles:
        _read_shards(checkpoint / CRITIC, parameters, "critic")
    file = checkpoint / OPTIMIZER
    found = read_entries(file)
    if any(name not in found or found[name].numel != parameters.size for name in MOMENTS):
        raise ConfigError(
            f"{file} does not fit what is trained: it is of a run with another algorithm.advantage or algorithm.critic "
            "(a critic is trained, too)"
        )
    optimizer.load(partial(read_part, file))


@torch.no_grad()
def _read_shards(file: Path, parameters: ShardedParameters, role: str) -> None:
    shapes = {name: entry.shape for name, entry in read_entries(file).items()}
    if shapes != {slot.name: slot.shape for slot in parameters.slots(role)}:  # a part of a larger one would fit as well
        raise ConfigError(f"{file} does not fit the {role} that is trained: its tensors have other names or shapes")
    for part, slot in zip(parameters.of(role), parameters.slots(role), strict=True):
        values = read_part(file, slot.name, part.first - part.slot.offset, part.values.numel())
        part.values.copy_(values.view(part.values.shape))


def _begin(folder: Path, updater: Updater, begin: Callable[[], None]) -> None:
    """What rank 0 alone writes, then empty files for what all write."""
    begin()
    size = updater.flat.size
    create(folder / OPTIMIZER, dict.fromkeys(MOMENTS, (size,)) | {"step": ()})
    if updater.config.sharded:
        create(folder / "hf" / MODEL, {slot.name: slot.shape for slot in updater.flat.slots("policy")})
        if "critic" in updater.flat.roles:
            create(folder / CRITIC, {slot.name: slot.shape for slot in updater.flat.slots("critic")})


def _write_parts(folder: Path, updater: Updater) -> None:
    group = updater.group
    write_parts(folder / OPTIMIZER, updater.optimizer.parts(), group)
    if updater.config.sharded:
        parameters, _ = _shards_of(updater)
        files = {"policy": folder / "hf" / MODEL, "critic": folder / CRITIC}
        for role in parameters.roles:
            named = zip(parameters.of(role), parameters.slots(role), strict=True)
            parts = [(slot.name, part.first - part.slot.offset, part.values) for part, slot in named]
            write_parts(files[role], parts, group)


def _shards_of(updater: Updater) -> tuple[ShardedParameters, ShardedAdamW]:
    from learner.sharded import ShardedAdamW, ShardedParameters  # not for who has none

    assert isinstance(updater.flat, ShardedParameters)
    assert isinstance(updater.optimizer, ShardedAdamW)
    return updater.flat, updater.optimizer


def _fault_of(work: Callable[[], Any]) -> Exception | None:
    """What keeps the work from being done: all ranks must come to the vote that follows."""
    try:
        work()
    except (OSError, SafetensorError, ConfigError) as error:
        return error
    return None
