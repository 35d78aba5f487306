"""What safetensors files say about themselves: names, types, shapes and places of their tensors, without torch.

FILE: 8 bytes size of the header │ header, JSON │ tensors
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from async_rl.errors import ConfigError

_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    dtype: str
    """As the format writes it, such as ``F32``."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    stop: int
    """The byte behind its last one."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_entries(file: Path) -> dict[str, Entry]:
    """The tensors of a file by name.

    Raises:
        ConfigError: it is damaged or cut short.
    """
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(size, _MAX_HEADER_BYTES)))
        first, entries = 8 + size, {}
        for name, found in header.items():
            if name != "__metadata__":
                start, stop = found["data_offsets"]
                entries[name] = Entry(str(found["dtype"]), tuple(map(int, found["shape"])), first + start, first + stop)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is no safetensors file: {error}; save or fetch the model again") from None
    end = max((entry.stop for entry in entries.values()), default=first)
    if file.stat().st_size != end:
        raise ConfigError(
            f"{file} is cut short: {file.stat().st_size:,} bytes, {end:,} by its header; save or fetch the model again"
        )
    return entries


def read_folder(folder: Path) -> dict[str, Entry]:
    """The tensors of all files of a model folder; places are those in their own files.

    Raises:
        ConfigError: a file is damaged or cut short.
    """
    return {name: entry for file in sorted(folder.glob("*.safetensors")) for name, entry in read_entries(file).items()}
