"""An actor that does nothing but receive weights, and send them on, for ``bench weights``.

python -m actors.bench.receiving shm|zmq|auto RUN_ID ADDRESS [--host NAME] [--delta]     answers "fetch" on its input

With ``--host`` it pretends to be a host of its own: it shares nothing with others, relays, and answers "address".
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from actors.receiver import Receiver
from actors.relay import Relay
from async_rl.bench.weights_parts import ANSWER_S, answer_lines
from async_rl.errors import DeadlineError
from async_rl.weights.manifest import Manifest
from async_rl.weights.tree import Parent


class Receiving:
    """A receiver whose versions nobody loads.

    Args:
        path: as ``weights.path``.
        run_id: of the versions.
        address: of the chunk server.
        stall_s: as the receiver's.
        host: that it pretends to be, and relays for; empty: neither.
        delta: as ``weights.delta``.
    """

    def __init__(
        self, path: Any, run_id: str, address: str, stall_s: float = 5.0, *, host: str = "", delta: bool = False
    ) -> None:
        self._relay = Relay("tcp://127.0.0.1:*", None) if host else None
        self._receiver = Receiver(path, lambda: address, run_id, stall_s, relay=self._relay, delta=delta, host=host)

    def address(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Where others pull from."""
        return {"address": self._relay.address if self._relay is not None else ""}

    def fetch(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Prepare a version; ``parents``, if it is given, as in the message of that name.

        Raises:
            DeadlineError: it did not come.
        """
        manifest = Manifest.from_wire(asked["manifest"])
        self._receiver.follow([Parent(address, depth) for address, depth in asked.get("parents", ())])
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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path")
    parser.add_argument("run_id")
    parser.add_argument("address")
    parser.add_argument("--host", default="")
    parser.add_argument("--delta", action="store_true")
    given = parser.parse_args()
    made = Receiving(given.path, given.run_id, given.address, host=given.host, delta=given.delta)
    with contextlib.closing(made) as receiving:
        answer_lines({"fetch": receiving.fetch, "address": receiving.address})


if __name__ == "__main__":
    main()
