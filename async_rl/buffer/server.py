"""The buffer server: the socket in front of the :class:`~async_rl.buffer.service.Service`, and its process.

    clients ◄──► ROUTER ──recv──► service.handle ─► service.pump ─► service.post ──send──► ROUTER
                                  timer ─► service.tick      writer thread ─► eventfd ─► turn of the loop

    python -m async_rl.buffer.server CONFIG.toml --out DIR [--resume CHECKPOINT_DIR | --recover]

One thread owns the socket. Delivery: TCP keeps a client's order; nothing is dropped while the client lives, because
what is sent is bounded by credit. A client that cannot be reached, or does not read, is let go and its leases return.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import resource
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

import zmq

from async_rl.buffer.control_rules import ControlRules
from async_rl.buffer.files import RunFiles
from async_rl.buffer.memory import keep_free_memory
from async_rl.buffer.opening import open_ledger
from async_rl.buffer.records import Limits
from async_rl.buffer.run_lines import keep_lines
from async_rl.buffer.service import Service, Weights
from async_rl.config import AnyConfig, BufferConfig, ControlConfig, RunConfig, load_any
from async_rl.control import spaces
from async_rl.curve import Gate, ServerKeys, check_open, secure_server
from async_rl.errors import ConfigError, StartAgainError, WeightsError
from async_rl.process import die_with_parent, run_guarded, spare_what_is_loaded
from async_rl.protocol import BEATS_PER_PERIOD
from async_rl.route import speak_its_family
from async_rl.runfolder import read_json
from async_rl.weights.server import WeightServer
from async_rl.wire import LIMITS, receive_frames, send_frames

_BURST = 64
"""Messages taken from the socket before anything else is done, ..."""
_BURST_S = 0.001
"""... or fewer once so much time has passed: their acknowledgements wait for the last of them."""
_MOST_CLIENTS = 65_536
"""More are never connected: the system has no more descriptors."""
_BACKLOG = 4096
"""Connections that may wait to be accepted: whoever comes while thousands do waits no second for the next try."""
_UNREAD = 1000
"""Messages queued for one client that does not read; beyond it the client is let go."""
_LINGER_MS = 2000
_NOBLOCK = int(zmq.NOBLOCK)
"""As a plain number, which the socket takes at once."""


REBIND_S = 5.0
"""A restarted server waits so long for the addresses of the one that died."""
_REBIND_PAUSE_S = 0.1


class Server:
    """Owns the ROUTER socket of one run. Use as a context manager; :meth:`run` returns the exit code.

    Args:
        config: the run.
        out: run folder.
        limits: what model or environment say about groups; others are refused.
        weights: chunk server, already started.
        resume: checkpoint folder with ``ledger.json`` and ``groups.bin``.
        recover: take the place of a server that died: its address, its run, its journal.

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
        *,
        recover: bool = False,
    ) -> None:
        check_bind(config.buffer)
        self._config = config
        self._keys = ServerKeys.of(config.buffer.keys)
        self._gate: Gate | None = None
        self._files = RunFiles(out)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._interrupted = False
        self._context = zmq.Context()
        try:
            before = read_json(out / "server.json") if recover else {}
            self._socket = self._bind(str(before.get("address", config.buffer.bind)), patient=recover)
            opened = open_ledger(config, limits, out, resume, recover=recover)
            keep_lines(self._files, opened.ledger)
            self._files.mend("timeline")
            self.run_id = str(before.get("run_id", uuid.uuid4().hex[:12]))
            self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            self.service = Service(
                config,
                opened.ledger,
                self._files,
                weights,
                self.run_id,
                time.monotonic(),
                self.wake,
                recovered=opened.recovered,
                disowned=opened.disowned,
                base=limits.base,
            )
        except Exception:
            self._release()
            raise
        self._files.replace(
            "server",
            {
                "address": self.address,
                "weights_address": weights.address,
                "pid": os.getpid(),
                "run_id": self.run_id,
            },
        )
        is_back = " goes on" if opened.recovered else ""
        print(f"buffer server of run {self.run_id} on {self.address}{is_back}", flush=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self) -> int:
        """Serve until the run has ended; 0 if it completed or was stopped, 1 if it failed.

        Raises:
            StartAgainError: the learner has a checkpoint that is newer than this ledger.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        period_s = self._config.buffer.heartbeat_s / (2 * BEATS_PER_PERIOD)
        next_tick, backlog = time.monotonic() + period_s, 0
        while self.service.ending.phase != "ended" and self.service.newer is None:
            poller.poll(max(0, math.ceil((next_tick - time.monotonic()) * 1000)))
            with self.service.ledger.batch():  # on record at its end, and answered then
                woken = self._take_wakeup()
                taken = self._receive()
                backlog = backlog + taken if taken else 0
                now = time.monotonic()
                if woken or now >= next_tick:
                    if self._interrupted:
                        self.service.ending.wind_down("the server was interrupted", now)
                    # A client is silent only if nothing of it waits in the socket, e.g. after this process was paused.
                    # The socket takes turns between clients: after so many messages each was heard that had sent any,
                    # so that one who never lets the socket run empty cannot hide the silence of the others.
                    self.service.tick(now, all_heard=not taken or backlog > _MOST_CLIENTS)
                    next_tick = now + period_s
                self.service.tell(now)
            self._send(now)  # no acknowledgement waits until a step is handed out
            with self.service.ledger.batch():
                self.service.pump(now)
            self._send(now)
        self._send(time.monotonic())
        if self.service.newer is not None:
            raise StartAgainError(
                f"the journal was lost while the learner wrote {self.service.newer}: started again, the server goes on "
                "from there"
            )
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

    def _bind(self, address: str, *, patient: bool) -> zmq.Socket[bytes]:
        """The socket; ``patient``: the address may be taken for a moment more, by the process that died."""
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, _UNREAD)
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        socket.setsockopt(zmq.MAXMSGSIZE, LIMITS.frame_bytes)
        if self._keys is not None:
            self._gate = Gate(self._context, self._keys)
            secure_server(socket, self._keys)
        deadline = time.monotonic() + (REBIND_S if patient else 0.0)
        while True:
            try:
                speak_its_family(socket, address)
                socket.bind(address)
                return socket
            except zmq.ZMQError as error:
                is_taken = error.errno == errno.EADDRINUSE
                if is_taken and time.monotonic() < deadline:
                    threading.Event().wait(_REBIND_PAUSE_S)
                    continue
                socket.close(0)
                hint = "; another program listens there; choose another port or end it" if is_taken else ""
                raise ConfigError(f"buffer.bind = {address!r}: {error.strerror}{hint}") from None

    def _receive(self) -> int:
        """Handle what waits in the socket, a burst at most: how many messages, or 0 if the socket is empty then."""
        now, taken = time.monotonic(), 0
        while not taken or (taken < _BURST and time.monotonic() - now <= _BURST_S):  # 0 is said of a socket looked into
            try:
                identity = self._socket.recv(_NOBLOCK)
            except zmq.Again:
                return 0
            self.service.handle(identity, receive_frames(self._socket), now)
            taken += 1
        return taken

    def _send(self, now: float) -> None:
        for identity, frames in self.service.post.take():
            try:
                send_frames(self._socket, [identity, *frames])
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
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(_LINGER_MS)
        os.close(self._wakeup)


def check_bind(buffer: BufferConfig) -> None:
    """Refuse an address that other hosts can reach, unless there are keys or it is asked for.

    Raises:
        ConfigError: it is refused, or no address at all.
    """
    address = buffer.bind
    host = address.removeprefix("tcp://")
    if host == address or ":" not in host:
        raise ConfigError(f"buffer.bind = {address!r}: write it as tcp://HOST:PORT (* as the port takes a free one)")
    check_open(address, buffer.keys, insecure=buffer.insecure)


def limits_of(config: AnyConfig, out: Path) -> Limits:
    """What the run's model and data, or its environment, say about groups.

    Raises:
        ConfigError: they cannot be read.
    """
    if isinstance(config, ControlConfig):
        rules = ControlRules.from_config(config, spaces.Spaces.read(out / spaces.FILE))
        return Limits(num_tasks=config.num_tasks, control=rules)

    from async_rl.base_checksum import base_of
    from async_rl.models import context_length, resolve_model, vocabulary_size
    from async_rl.tasks import load_task

    model = resolve_model(config.model.path)
    return Limits(
        num_tasks=len(load_task(config.task, config.seed).train),
        vocabulary=vocabulary_size(model),
        context=context_length(model),
        base=base_of(config),
    )


def main() -> None:
    """The process: parse, start the chunk server, serve."""
    parser = argparse.ArgumentParser(prog="python -m async_rl.buffer.server", description=__doc__.partition("\n")[0])
    parser.add_argument("config", help="resolved config.toml")
    parser.add_argument("--out", type=Path, required=True, help="run folder")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--resume", type=Path, help="checkpoint folder")
    begin.add_argument("--recover", action="store_true", help="take the place of a server that died; its clients go on")
    arguments = parser.parse_args()
    die_with_parent()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection takes one

    config = load_any(arguments.config)
    check_bind(config.buffer)
    limits = limits_of(config, arguments.out)
    keys, anew = ServerKeys.of(config.buffer.keys), config.buffer.bind.rpartition(":")[0] + ":*"
    if arguments.recover:
        before = str(read_json(arguments.out / "server.json").get("weights_address", anew))
        weights = _weights_again(lambda: WeightServer(before, keys, delta=config.weights.delta))
    else:
        weights = WeightServer(anew, keys, delta=config.weights.delta)
        weights.start()
    keep_free_memory()
    spare_what_is_loaded()
    try:
        with Server(config, arguments.out, limits, weights, arguments.resume, recover=arguments.recover) as server:

            def interrupt(number: int, frame: FrameType | None) -> None:
                server.interrupt()

            signal.signal(signal.SIGINT, interrupt)
            signal.signal(signal.SIGTERM, interrupt)
            code = server.run()
    finally:
        weights.close()
    sys.exit(code)


def _weights_again(make: Callable[[], WeightServer]) -> WeightServer:
    """A chunk server on the address of the one that died, which may be taken for a moment more.

    Raises:
        WeightsError: it is still taken after :data:`REBIND_S`.
    """
    deadline = time.monotonic() + REBIND_S
    while True:
        weights = make()
        try:
            weights.start()
            return weights
        except WeightsError:
            weights.close()
            if time.monotonic() > deadline:
                raise
        threading.Event().wait(_REBIND_PAUSE_S)


if __name__ == "__main__":
    run_guarded(main)
