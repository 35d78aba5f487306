"""What the server writes into a checkpoint, as far as the learner looks at it."""

import json
from pathlib import Path

from async_rl.buffer.journal import SCHEMA


def server_part(folder: Path) -> None:
    (folder / "ledger.json").write_text(json.dumps({"schema": SCHEMA}))
    (folder / "groups.bin").write_bytes(b"")
