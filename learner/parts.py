"""A safetensors file that several ranks fill together: each writes its ranges of the tensors, or sends them to rank 0.

    rank 0: header, full length ─► every rank: its parts, at their places in the file, fsync      ranks of one host
                                └► every part ─► rank 0 ─► the file                               hosts have own disks

The file is as if one process had written it: it does not tell how many ranks there were.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from async_rl.errors import ConfigError
from async_rl.safetensors_files import read_entries
from learner.group import LearnerGroup

Part = tuple[str, int, torch.Tensor]
"""Tensor, first element in it, values on any device, contiguous."""

BLOCK = 1 << 24
"""Elements that each rank sends at a time: rank 0 holds so many of every rank, whatever a tensor's size."""
_ITEM = 4


def create(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A file of float32 tensors that are all zero; on a file system that can, it takes no space yet."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, shape in shapes.items():
        start, stop = stop, stop + _ITEM * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + stop)


def write_parts(file: Path, parts: Iterable[Part], group: LearnerGroup) -> None:
    """Fill a file that :func:`create` made with this rank's parts; every rank calls it.

    Args:
        file: on rank 0's host.
        parts: as many on each rank, in the same order.
        group: the ranks.

    Raises:
        OSError: the disk is full, or the file has gone; other ranks do not hear of it.
    """
    if group.hosts == 1:
        _write(file, parts)
        return
    sent = _sent(parts, group)
    try:
        if group.rank == 0:
            _write(file, sent)
    finally:
        for _ in sent:  # all send all they have, whether rank 0's disk is full or not
            pass


def read_part(file: Path, name: str, first: int, count: int) -> torch.Tensor:
    """Some float32 elements of a tensor of a file, ``[count]`` on the CPU; nothing else is read.

    Raises:
        ConfigError: the file is damaged, or has no such elements.
    """
    entry = read_entries(file).get(name)
    if entry is None or entry.dtype != "F32" or first + count > entry.numel:
        raise ConfigError(f"{file} has no float32 {name} with {first + count} elements: it is of other models")
    with file.open("rb") as stream:
        stream.seek(entry.start + _ITEM * first)
        data = bytearray(stream.read(_ITEM * count))
    return torch.frombuffer(data, dtype=torch.float32) if count else torch.empty(0)


def _sent(parts: Iterable[Part], group: LearnerGroup) -> Iterator[Part]:
    """On rank 0 the parts of all ranks, block by block; on the others nothing, who send theirs meanwhile."""
    for name, first, values in parts:
        mine = values.detach().flatten()
        for start in range(0, group.max_over_ranks(mine.numel()), BLOCK):
            for place, block in group.gather_parts(first + start, mine[start : start + BLOCK].cpu()):
                yield name, place, block


def _write(file: Path, parts: Iterable[Part]) -> None:
    entries = read_entries(file)
    descriptor = os.open(file, os.O_WRONLY)
    try:
        for name, first, values in parts:
            if values.numel():
                raw = memoryview(values.detach().cpu().contiguous().flatten().numpy()).cast("B")
                _write_all(descriptor, raw, entries[name].start + _ITEM * first)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, raw: memoryview, place: int) -> None:
    """The kernel takes 2 GiB at most in one call."""
    while raw:
        count = os.pwrite(descriptor, raw, place)
        raw, place = raw[count:], place + count
