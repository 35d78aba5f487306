"""What ``bench weights`` runs: children that answer a line by a line, and the raw sockets beside the chunk server.

Talker ──{"ask": "fetch", ...} as hex──► child (answer_lines) ──{...}──► Talker          through its pipes
python -m async_rl.bench.weights_parts ADDRESS NBYTES CHUNK_BYTES     asks a RawServer, and drops what it gets
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from async_rl.errors import DeadlineError
from async_rl.process import die_with_parent
from async_rl.weights.manifest import Manifest
from async_rl.weights.pull import window
from async_rl.weights.segment import SegmentReader
from async_rl.wire import pack_header, unpack_header

ANSWER_S = 120.0
"""A child may take so long to start, or to answer."""
_LOOK_MS = 100
_END_S = 20.0


class Talker:
    """A child process that is asked; use as a context manager.

    Args:
        command: for the interpreter, such as ``-m MODULE``, whose process calls :func:`answer_lines`.
        log: its stderr.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log, self._name = log, " ".join(command)
        pipe = subprocess.PIPE
        with open(log, "wb") as stderr:
            self._process = subprocess.Popen([sys.executable, *command], stdin=pipe, stdout=pipe, stderr=stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Say and hear."""
        self.say(what, **fields)
        return self.hear()

    def say(self, what: str, **fields: Any) -> None:
        """One line to the child."""
        assert self._process.stdin is not None
        self._process.stdin.write(pack_header({"type": what, **fields}).hex().encode() + b"\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """One line from the child.

        Raises:
            DeadlineError: none came in time, or the process has ended; with what it wrote on stderr.
        """
        assert self._process.stdout is not None
        deadline, text = time.monotonic() + ANSWER_S, b""
        while not text.endswith(b"\n"):
            ready = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            more = os.read(self._process.stdout.fileno(), 1 << 20) if ready else b""
            if not more:
                raise DeadlineError(f"no answer from {self._name}: {self._log.read_text()[-2000:]}")
            text += more
        return dict(unpack_header(bytes.fromhex(text.decode())))

    def close(self) -> None:
        """Let it end in order, or by force."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S)
        self._process.stdout.close()


def answer_lines(answers: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]) -> None:
    """The child's end: answer until the input ends.

    Args:
        answers: what to do by the word that is asked.
    """
    die_with_parent()
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)  # what else is printed goes to the log
        for line in sys.stdin:
            asked = unpack_header(bytes.fromhex(line))
            told = answers[asked["type"]](asked)
            print(pack_header({"type": "told", **told}).hex(), file=out)


class RawServer:
    """A ROUTER in a thread that answers each request for a chunk by the chunk, and does nothing else.

    Args:
        manifest: of a version in a segment of this host; its bytes are sent whatever is written over them.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._reader = SegmentReader()
        self._data = self._reader.open(manifest)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(_END_S)
        self._context.destroy(linger=0)
        self._reader.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            if self._socket.poll(_LOOK_MS):
                peer, request = self._socket.recv_multipart(zmq.NOBLOCK)
                chunk = self._manifest.chunk(self._data, unpack_header(request)["chunk"])
                self._socket.send_multipart([peer, request, chunk], zmq.NOBLOCK, copy=False)


def pull_raw(socket: zmq.Socket[bytes], nbytes: int, chunk_bytes: int) -> float:
    """Ask for all chunks, as many at a time as the puller asks for; the seconds until the last one is there."""
    began = time.perf_counter()
    todo, arrived = iter(range(-(-nbytes // chunk_bytes))), 0
    for _, chunk in zip(range(window(chunk_bytes)), todo, strict=False):  # in this order: none of todo is lost
        socket.send(pack_header({"type": "get", "chunk": chunk}))
    while arrived < nbytes:
        if not socket.poll(int(ANSWER_S * 1e3)):
            raise DeadlineError(f"nothing from the raw socket for {ANSWER_S:g} s")
        arrived += len(socket.recv_multipart(zmq.NOBLOCK, copy=False)[1])
        if (following := next(todo, None)) is not None:
            socket.send(pack_header({"type": "get", "chunk": following}))
    return time.perf_counter() - began


def main() -> None:
    """The process of the raw DEALER."""
    address, nbytes, chunk_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(address)
        answer_lines({"pull": lambda _: {"seconds": pull_raw(socket, nbytes, chunk_bytes)}})


if __name__ == "__main__":
    main()
