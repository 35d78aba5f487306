"""An actor that does nothing but receive weights, for ``bench weights``.

python -m actors.bench.receiving shm|zmq|auto RUN_ID ADDRESS     answers "fetch" on its input
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from actors.receiver import Receiver
from async_rl.bench.weights_parts import ANSWER_S, answer_lines
from async_rl.errors import DeadlineError
from async_rl.weights.manifest import Manifest


class Receiving:
    """A receiver whose versions nobody loads.

    Args:
        path: as ``weights.path``.
        run_id: of the versions.
        address: of the chunk server.
        stall_s: as the receiver's.
    """

    def __init__(self, path: Any, run_id: str, address: str, stall_s: float = 5.0) -> None:
        self._receiver = Receiver(path, lambda: address, run_id, stall_s)

    def fetch(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Prepare a version.

        Raises:
            DeadlineError: it did not come.
        """
        manifest = Manifest.from_wire(asked["manifest"])
        began, cpu = time.monotonic(), time.process_time()
        self._receiver.fetch(manifest)
        prepared = self._receiver.wait(ANSWER_S / 2)
        if prepared is None:
            raise DeadlineError(f"version {manifest.version} did not come: {self._receiver.last_failure or 'silence'}")
        return {
            "began": began,
            "ended": time.monotonic(),
            "cpu_s": time.process_time() - cpu,
            "transfer_s": prepared.transfer_s,
            "path": prepared.path,
            "checksum": prepared.manifest.checksum,
        }

    def close(self) -> None:
        """End the receiver."""
        self._receiver.close()


def main() -> None:
    """The process."""
    with contextlib.closing(Receiving(sys.argv[1], sys.argv[2], sys.argv[3])) as receiving:
        answer_lines({"fetch": receiving.fetch})


if __name__ == "__main__":
    main()
