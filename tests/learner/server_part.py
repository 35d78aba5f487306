"""What the server writes into a checkpoint, as far as the learner looks at it."""

from pathlib import Path


def server_part(folder: Path) -> None:
    (folder / "ledger.json").write_text("{}")
    (folder / "groups.bin").write_bytes(b"")
