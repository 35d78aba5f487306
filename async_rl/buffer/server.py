"""The buffer server: the socket in front of the :class:`~async_rl.buffer.service.Service`, and its process.

    clients ◄──► ROUTER ──recv──► service.handle ─► service.pump ─► service.post ──send──► ROUTER
                                  timer ─► service.tick      writer thread ─► eventfd ─► turn of the loop

    python -m async_rl.buffer.server CONFIG.toml --out DIR [--resume CHECKPOINT_DIR]

One thread owns the socket. Delivery: TCP keeps a client's order; nothing is dropped while the client lives, because
what is sent is bounded by credit. A client that cannot be reached, or does not read, is let go and its leases return.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import signal
import sys
import time
import uuid
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType

import zmq

from async_rl.buffer import journal
from async_rl.buffer.annotating import awaited
from async_rl.buffer.control_rules import ControlRules
from async_rl.buffer.curriculum import Curriculum
from async_rl.buffer.files import RunFiles
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.records import Limits, Rules
from async_rl.buffer.service import Service, Weights
from async_rl.buffer.stream import task_index
from async_rl.config import AnyConfig, Config, ControlConfig, RunConfig, load_any
from async_rl.control import spaces
from async_rl.errors import ConfigError
from async_rl.process import die_with_parent, run_guarded
from async_rl.wire import LIMITS, Frame

_BURST = 1024
"""Messages taken from the socket before anything else is done."""
_UNREAD = 10_000
"""Messages queued for one client that does not read; beyond it the client is let go."""
_LINGER_MS = 2000
_COPY_BELOW = 65_536
"""Frames smaller than this are copied out of the socket's buffers; larger ones are used in place."""
_LOOPBACK = ("127.", "localhost", "[::1]")


class Server:
    """Owns the ROUTER socket of one run. Use as a context manager; :meth:`run` returns the exit code.

    Args:
        config: the run.
        out: run folder.
        limits: what model or environment say about groups; others are refused.
        weights: chunk server, already started.
        resume: checkpoint folder with ``ledger.json`` and ``groups.bin``.

    Raises:
        ConfigError: the address is taken, or open to other hosts without ``buffer.insecure``; a bad checkpoint.
    """

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        limits: Limits,
        weights: Weights,
        resume: Path | None = None,
    ) -> None:
        check_bind(config.buffer.bind, config.buffer.insecure)
        self._config = config
        self._files = RunFiles(out)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._interrupted = False
        self._context = zmq.Context()
        try:
            self._socket = self._bind(config.buffer.bind)
            ledger = make_ledger(config, limits, resume)
        except Exception:
            self._release()
            raise
        if resume is not None:
            self._files.keep("batches", lambda row: row.get("step", 0) < ledger.version)
            self._files.keep("evals", lambda row: row.get("version", 0) <= ledger.version)
            again = {ordinal for ordinal, _, _ in ledger.retry}
            again |= {e.ordinal for e in ledger.scoring.values() if "reward" in awaited(e.payload, ledger.rules.stages)}
            self._files.keep(
                "samples",
                lambda row: row.get("ordinal", 0) not in again and row.get("ordinal", 0) < ledger.next_ordinal,
            )
            self._files.keep("timeline", lambda row: True)
        self.run_id = uuid.uuid4().hex[:12]
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.service = Service(config, ledger, self._files, weights, self.run_id, time.monotonic(), self.wake)
        self._files.replace("server", {"address": self.address, "pid": os.getpid(), "run_id": self.run_id})
        print(f"buffer server of run {self.run_id} on {self.address}", flush=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self) -> int:
        """Serve until the run has ended; 0 if it completed or was stopped, 1 if it failed."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        period_s = self._config.buffer.heartbeat_s / 2
        next_tick = time.monotonic() + period_s
        while self.service.phase != "ended":
            poller.poll(max(0, math.ceil((next_tick - time.monotonic()) * 1000)))
            woken = self._take_wakeup()
            drained = self._receive()
            now = time.monotonic()
            if woken or now >= next_tick:
                if self._interrupted:
                    self.service.wind_down("the server was interrupted", now)
                # A client is silent only if nothing of it waits in the socket, e.g. after this process was paused.
                self.service.tick(now, all_heard=drained)
                next_tick = now + period_s
            self.service.pump(now)
            self._send(now)
        self._send(time.monotonic())
        return 1 if self.service.account.status == "failed" else 0

    def wake(self) -> None:
        """Make the loop turn now; safe from any thread and from signal handlers."""
        os.eventfd_write(self._wakeup, 1)

    def interrupt(self) -> None:
        """Wind down, as on SIGINT."""
        self._interrupted = True
        self.wake()

    def close(self) -> None:
        """Write the final books, let the last messages leave, free the socket."""
        try:
            self.service.close()
        finally:
            self._release()

    def _bind(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, _UNREAD)
        socket.setsockopt(zmq.MAXMSGSIZE, LIMITS.frame_bytes)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(0)
            hint = (
                "another program listens there; choose another port or end it"
                if error.errno == errno.EADDRINUSE
                else ""
            )
            raise ConfigError(f"buffer.bind = {address!r}: {error.strerror}{'; ' if hint else ''}{hint}") from None
        return socket

    def _receive(self) -> bool:
        """Handle what waits in the socket, a burst at most; True if the socket is empty then."""
        now = time.monotonic()
        for _ in range(_BURST):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            self.service.handle(identity.bytes, [_contents(f) for f in frames], now)
        return False

    def _send(self, now: float) -> None:
        for identity, frames in self.service.post.take():
            try:
                self._socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
            except zmq.ZMQError as error:
                if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                    raise
                self.service.unreachable(identity, now)
                self.wake()  # its tickets have returned, and the answers to that wait in the post

    def _take_wakeup(self) -> bool:
        try:
            return os.eventfd_read(self._wakeup) > 0
        except BlockingIOError:
            return False

    def _release(self) -> None:
        self._files.close()
        self._context.destroy(_LINGER_MS)
        os.close(self._wakeup)


def check_bind(address: str, insecure: bool) -> None:
    """Refuse an address that other hosts can reach, unless it is asked for.

    Raises:
        ConfigError: it is not a loopback address, or no address at all.
    """
    host = address.removeprefix("tcp://")
    if host == address or ":" not in host:
        raise ConfigError(f"buffer.bind = {address!r}: write it as tcp://HOST:PORT (* as the port takes a free one)")
    if not host.startswith(_LOOPBACK) and not insecure:
        raise ConfigError(
            f"buffer.bind = {address!r} can be reached by other hosts and has no keys: bind tcp://127.0.0.1:PORT, or "
            "set buffer.insecure = true inside a network that you trust"
        )


def make_ledger(config: RunConfig, limits: Limits, resume: Path | None) -> Ledger:
    """A fresh ledger, or the one of a checkpoint.

    Raises:
        ConfigError: the checkpoint cannot be read.
    """
    rules, stream = Rules.from_config(config, limits), partial(_task_of, config.seed, limits.num_tasks)
    has_curriculum = isinstance(config, Config) and config.task.curriculum
    curriculum = Curriculum(stream, config.seed) if has_curriculum else None
    if resume is None:
        return Ledger(rules, stream, curriculum)
    return journal.thaw(journal.load(resume), rules, stream, curriculum, time.monotonic())


def _task_of(seed: int, num_tasks: int, ordinal: int) -> int:
    return task_index(seed, ordinal, num_tasks)


def _contents(frame: zmq.Frame) -> Frame:
    return frame.bytes if len(frame) < _COPY_BELOW else frame.buffer


def limits_of(config: AnyConfig, out: Path) -> Limits:
    """What the run's model and data, or its environment, say about groups.

    Raises:
        ConfigError: they cannot be read.
    """
    if isinstance(config, ControlConfig):
        rules = ControlRules.from_config(config, spaces.Spaces.read(out / spaces.FILE))
        return Limits(num_tasks=config.num_tasks, control=rules)

    from async_rl.models import context_length, resolve_model, vocabulary_size
    from async_rl.tasks import load_task

    model = resolve_model(config.model.path)
    return Limits(
        num_tasks=len(load_task(config.task, config.seed).train),
        vocabulary=vocabulary_size(model),
        context=context_length(model),
    )


def main() -> None:
    """The process: parse, start the chunk server, serve."""
    parser = argparse.ArgumentParser(prog="python -m async_rl.buffer.server", description=__doc__.partition("\n")[0])
    parser.add_argument("config", help="resolved config.toml")
    parser.add_argument("--out", type=Path, required=True, help="run folder")
    parser.add_argument("--resume", type=Path, help="checkpoint folder")
    arguments = parser.parse_args()
    die_with_parent()

    from async_rl.weights.server import WeightServer

    config = load_any(arguments.config)
    check_bind(config.buffer.bind, config.buffer.insecure)
    limits = limits_of(config, arguments.out)
    weights = WeightServer(config.buffer.bind.rpartition(":")[0] + ":*")
    weights.start()
    try:
        with Server(config, arguments.out, limits, weights, arguments.resume) as server:

            def interrupt(number: int, frame: FrameType | None) -> None:
                server.interrupt()

            signal.signal(signal.SIGINT, interrupt)
            signal.signal(signal.SIGTERM, interrupt)
            code = server.run()
    finally:
        weights.close()
    sys.exit(code)


if __name__ == "__main__":
    run_guarded(main)
