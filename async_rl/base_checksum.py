"""The checksum of the base of an adapter: two hosts that start from the same model have the same one.

    config.json (what computes) ─┐
    each tensor: name, type, shape, bytes ─ in order of names ─┴─► xxh3-128        however many files they lie in

Only the adapter is published, so that nothing else would show that an actor computes on another base.
"""

from __future__ import annotations

import functools
import json
import mmap
from pathlib import Path

import xxhash

from async_rl.config import Config, RunConfig
from async_rl.errors import ConfigError
from async_rl.models import resolve_model
from async_rl.safetensors_files import read_entries

_SAYS_NOTHING = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""Keys of ``config.json`` that depend on who saved the model, not on what it computes."""


def base_of(config: RunConfig) -> str:
    """Checksum of the base of a run with an adapter; empty for other runs.

    Raises:
        ConfigError: the model is not there, or cannot be read.
    """
    if isinstance(config, Config) and config.lora.is_on:
        return _once(resolve_model(config.model.path))
    return ""


def base_checksum(folder: Path) -> str:
    """Hex xxh3-128 over configuration and tensors of a model folder; reads all of it.

    Raises:
        ConfigError: there is no model, or a file is damaged.
    """
    try:
        settings = json.loads((folder / "config.json").read_text())
        kept = {key: value for key, value in settings.items() if key not in _SAYS_NOTHING}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / 'config.json'} cannot be read as a model's configuration: {error}") from None
    lines = [line for file in folder.glob("*.safetensors") for line in _tensors_of(file)]
    if not lines:
        raise ConfigError(f"{folder} has no *.safetensors: an adapter needs the weights of its base; save them there")
    return str(xxhash.xxh3_128_hexdigest("\n".join([json.dumps(kept, sort_keys=True), *sorted(lines)]).encode()))


def _tensors_of(file: Path) -> list[str]:
    """A line for each tensor of a file: name, type, shape, xxh3-128 of its bytes."""
    entries = read_entries(file)
    if not entries:
        return []
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        view = memoryview(data)
        try:
            return [
                f"{name} {entry.dtype} {list(entry.shape)} {xxhash.xxh3_128_hexdigest(view[entry.start : entry.stop])}"
                for name, entry in entries.items()
            ]
        finally:
            view.release()


_once = functools.cache(base_checksum)
"""A process reads its base once: nobody may change it while it runs."""
