"""Files and folders that a setting names: the user's own, or one that ships beside the presets."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def find_shipped(name: str) -> Path | None:
    """Where the named file or folder is; None where there is none.

    Args:
        name: path of one of the user's, which comes first; or a name without folders that ``async_rl/presets`` has.
    """
    own = Path(name).expanduser()
    if own.exists():
        return own
    beside = Path(str(resources.files("async_rl") / "presets")) / name
    return beside if Path(name).name == name and beside.exists() else None
