"""Bytes and seconds as people read and write them. Pure."""

from __future__ import annotations

import re

from async_rl.errors import ConfigError

_UNITS = {"": 1, "B": 1} | {
    prefix + unit: base**power for power, prefix in enumerate("kMG", 1) for unit, base in (("B", 1000), ("iB", 1024))
}


def parse_bytes(text: str) -> int:
    """``1KiB``, ``500 MB`` or ``4096`` as a number of bytes, at least one.

    Raises:
        ConfigError: it is none of these.
    """
    match = re.fullmatch(r"(\d{1,15})\s*([kKMG]?i?B?)", text.strip())
    unit = match[2].replace("K", "k") if match else ""
    if match is None or unit not in _UNITS or int(match[1]) < 1:
        raise ConfigError(f"{text!r} is no size: write it like 4096, 1KiB, 1MiB or 500MB")
    return int(match[1]) * _UNITS[unit]


def format_bytes(count: float) -> str:
    """``2.4 MB``: decimal units, two digits that matter."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """``3 s``, ``2 min 05 s``, ``1 h 02 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
