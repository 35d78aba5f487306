"""The seal of a checkpoint: what each of its files was when it was written, so that a bit that a disk lost is found.

    every file ─► size, xxh3-128 ─► seal.json, before the checkpoint gets its name
    find_start ─► every file again ─► as it was, or the checkpoint is damaged

Sizes and headers show a file that is cut short; nothing else would show a number that has changed inside one.
"""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from async_rl.errors import ConfigError
from async_rl.form import parse

SEAL = "seal.json"
_BLOCK_BYTES = 1 << 20


def seal(folder: Path) -> None:
    """Write down what the files of a checkpoint are.

    Raises:
        OSError: one cannot be read, or the disk is full.
    """
    found = {path.relative_to(folder).as_posix(): _digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / SEAL).write_text(json.dumps(found, indent=1) + "\n")


def check_seal(folder: Path) -> None:
    """Compare the files of a checkpoint with its seal; one without, of an earlier time, is taken as it is.

    Raises:
        ConfigError: names the file that is not what was written.
    """
    try:
        sealed = parse((folder / SEAL).read_bytes())
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{folder / SEAL} cannot be read: {error}") from None
    if not isinstance(sealed, dict):
        raise ConfigError(f"{folder / SEAL} is damaged")
    for name, digest in sealed.items():
        try:
            held = _digest(folder / name)
        except OSError as error:
            raise ConfigError(f"{folder / name} cannot be read: {error}") from None
        if held != digest:
            raise ConfigError(f"{folder / name} is not what was saved: its bytes have changed since")


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        block = bytearray(_BLOCK_BYTES)
        while count := stream.readinto(block):
            state.update(memoryview(block)[:count])
    return state.hexdigest()
