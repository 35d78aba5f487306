"""The learner's side of ``bench weights``: publisher process, chunk server, raw server; and receivers as asked for."""

from __future__ import annotations

import tempfile
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from async_rl.bench.weights_parts import RawServer, Talker
from async_rl.weights.manifest import Manifest
from async_rl.weights.segment import unlink_run
from async_rl.weights.server import WeightServer

CHUNK_BYTES = 4 << 20
"""The default of ``weights.chunk_bytes``."""


class Stage:
    """Publishes one version after the other.

    Args:
        stack: closes what is started.
        nbytes: of a version.
        chunk_bytes: per checksum.
        source: run folder whose two newest checkpoints are published in turns, in bfloat16; None: random numbers.
        delta: the chunk server sends differences.
    """

    def __init__(
        self,
        stack: ExitStack,
        nbytes: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        source: Path | None = None,
        delta: bool = False,
    ) -> None:
        self.nbytes = nbytes
        self._stack = stack
        self._chunk_bytes = chunk_bytes
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="async-rl-bench-")))
        self.run_id = f"bench-{uuid.uuid4().hex[:8]}"
        self._version = 0
        stack.callback(unlink_run, self.run_id)
        module = "learner.bench.publishing" if source is None else "learner.bench.republishing"
        what = str(nbytes) if source is None else str(source)
        self.publisher = self.start(module, self.run_id, what, str(chunk_bytes))
        self.server = WeightServer("tcp://127.0.0.1:*", delta=delta)
        self.server.start()
        stack.callback(self.server.close)

    def publish(self) -> tuple[dict[str, Any], Manifest]:
        """The next version: what the publisher measured, and its manifest."""
        told = self.publisher.ask("publish", version=self._version)
        self._version += 1
        manifest = Manifest.from_wire(told["manifest"])
        self.server.serve(manifest)
        return told, manifest

    def receiver(self, path: str, *options: str) -> Talker:
        """A process with a receiver in it, which asks the chunk server."""
        return self.start("actors.bench.receiving", path, self.run_id, self.server.address, *options)

    def host(self, name: str, learner: str) -> Talker:
        """A process that pretends to be a host of its own, which sends weights on.

        Args:
            name: of the host.
            learner: where it reaches the chunk server.
        """
        self._stack.callback(unlink_run, f"{self.run_id}-{name}")
        return self.start("actors.bench.receiving", "zmq", self.run_id, learner, "--host", name)

    def raw(self) -> tuple[RawServer, Talker]:
        """A ROUTER with the newest version's bytes, and a process that asks it."""
        server = RawServer(self.publish()[1])
        self._stack.callback(server.close)
        return server, self.start(
            "async_rl.bench.weights_parts", server.address, str(self.nbytes), str(self._chunk_bytes)
        )

    def start(self, module: str, *arguments: str) -> Talker:
        """A child process that answers."""
        return self._stack.enter_context(Talker(["-m", module, *arguments], self._folder / f"{uuid.uuid4().hex}.log"))
