"""Bytes and seconds as people read them. Pure."""

from __future__ import annotations


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
