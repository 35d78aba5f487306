"""What benchmarks of the buffer talk to: the real server in a process of its own, and a bare ROUTER beside it.

ServerProcess ─► python -m async_rl.buffer.server CONFIG --out DIR     (a model folder of one file says the sizes)
EchoProcess   ─► python -m async_rl.bench.served [keep] [reuse]    a bare ROUTER: acknowledges each message
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from async_rl.buffer.memory import keep_free_memory
from async_rl.config import Config, parse_config, to_toml
from async_rl.errors import DeadlineError
from async_rl.process import die_with_parent
from async_rl.runfolder import read_json
from async_rl.weights.manifest import Manifest, Tensor, chunk_checksums, combine
from async_rl.weights.segment import Segment, unlink_run
from async_rl.wire import Frame, receive_frames, send_frames

START_S = 60.0
"""A child process may take so long to listen, and to end."""
VOCABULARY, CONTEXT = 32_000, 1 << 24
GET = b"get"
_TICKS = os.sysconf("SC_CLK_TCK")
_NBYTES = 8
_LOOK_MS = 1000


class Child:
    """A process that says on a line of its output where it listens; use as a context manager."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with open(log, "wb") as stderr:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def line(self, part: str) -> str:
        """Wait for a line of output that has ``part`` in it.

        Raises:
            DeadlineError: it has not come in time, or the process has ended; with what it wrote on stderr.
        """
        assert self.process.stdout is not None
        deadline, text = time.monotonic() + START_S, b""
        while not any(part.encode() in row for row in text.split(b"\n")[:-1]):
            left_s = deadline - time.monotonic()
            ready = left_s > 0 and select.select([self.process.stdout], [], [], left_s)[0]
            more = os.read(self.process.stdout.fileno(), 65_536) if ready else b""
            if not more:
                raise DeadlineError(f"no {part!r} from process {self.process.pid}: {self._log.read_text()[-2000:]}")
            text += more
        return next(row for row in text.decode(errors="replace").split("\n") if part in row)

    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds of its first thread, and of all threads, so far."""
        pid = self.process.pid
        return _cpu_s(Path(f"/proc/{pid}/task/{pid}/stat")), _cpu_s(Path(f"/proc/{pid}/stat"))

    def close(self) -> None:
        """End it, by force: nobody needs what it would still do."""
        self.process.kill()
        self.process.wait(START_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


class ServerProcess(Child):
    """The buffer server of a run of token sequences, with the journal of real runs, and the weights of a mock learner.

    Args:
        folder: an empty one, for the run.
        groups_per_step: of a step of the learner.
        group_size: sequences of a group.
        max_staleness: of the run.
        max_bytes: that the server holds at most.
    """

    def __init__(
        self,
        folder: Path,
        *,
        groups_per_step: int,
        group_size: int,
        max_staleness: int,
        max_bytes: int = 4 << 30,
    ) -> None:
        model = folder / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}))
        self.config = _config(model, groups_per_step, group_size, max_staleness, max_bytes)
        (folder / "config.toml").write_text(to_toml(self.config))
        module = [sys.executable, "-m", "async_rl.buffer.server"]
        super().__init__([*module, str(folder / "config.toml"), "--out", str(folder / "run")], folder / "server.log")
        self._segment: Segment | None = None
        try:
            self.line("buffer server of run")
            told = read_json(folder / "run" / "server.json")
            self.address, self.run_id = str(told["address"]), str(told["run_id"])
            self._segment = Segment(self.run_id, "0", _NBYTES)
        except BaseException:
            self.close()
            raise

    def manifest(self, version: int) -> Manifest:
        """Of weights of some bytes, the same in each version."""
        assert self._segment is not None
        chunks = chunk_checksums(self._segment.data, _NBYTES)
        return Manifest(
            version=version,
            run_id=self.run_id,
            tensors=(Tensor("w", "float32", (2,), 0),),
            nbytes=_NBYTES,
            chunk_bytes=_NBYTES,
            chunks=chunks,
            checksum=combine(chunks),
            segment=str(self._segment.path),
            host="",
            epoch=0,
        )

    def close(self) -> None:
        """End it and remove what it left in shared memory."""
        super().close()
        if self._segment is not None:
            unlink_run(self.run_id)


class EchoProcess(Child):
    """A ROUTER that takes each message out of the socket and acknowledges it, and does nothing else.

    Args:
        folder: for its log.
        keeps: it holds the frames of all messages until somebody says :data:`GET`, who gets them in one message.
        reuses: it has the allocator's settings of the server, see :mod:`async_rl.buffer.memory`.
    """

    def __init__(self, folder: Path, *, keeps: bool = False, reuses: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        options = [*(["keep"] if keeps else []), *(["reuse"] if reuses else [])]
        super().__init__([sys.executable, "-m", "async_rl.bench.served", *options], folder / "echo.log")
        try:
            self.address = self.line("tcp://").strip()
        except BaseException:
            self.close()
            raise


def _config(model: Path, groups_per_step: int, group_size: int, max_staleness: int, max_bytes: int) -> Config:
    raw: dict[str, Any] = {
        "steps": 1_000_000,
        "model": {"path": str(model)},
        "sampling": {"group_size": group_size, "max_new_tokens": CONTEXT},
        "algorithm": {"name": "reinforce_pp"},
        "buffer": {"groups_per_step": groups_per_step, "max_staleness": max_staleness, "max_bytes": max_bytes},
    }
    return parse_config(raw)


def _cpu_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def echo(*, keeps: bool, reuses: bool) -> None:
    """The process of :class:`EchoProcess`: its loop ends with its parent."""
    die_with_parent()
    if reuses:
        keep_free_memory()
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind("tcp://127.0.0.1:*")
    print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    kept: list[Frame] = []
    while True:
        socket.poll(_LOOK_MS)
        while True:
            try:
                identity = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            frames = receive_frames(socket)
            if frames == [GET]:
                send_frames(socket, [identity, *kept])
                kept.clear()
                continue
            send_frames(socket, [identity, b"ack"])
            if keeps:
                kept += frames


if __name__ == "__main__":
    echo(keeps="keep" in sys.argv[1:], reuses="reuse" in sys.argv[1:])
