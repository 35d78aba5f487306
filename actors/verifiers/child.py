"""The pool's side of one verifier child: a process, a socket to it, and bytes that wait to be written."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.verifiers.wire import Unpacker
from async_rl.sandbox import Sandbox

_ROOT = Path(__file__).resolve().parents[2]
_CHUNK = 1 << 16
"""Larger ones the C library maps and unmaps for each call."""
_END_S = 0.5
"""A process whose socket is closed has its exit code after this time, unless it lives on without the socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a child calls to score completions."""

    function: str
    """``module:function``."""
    parameters: Mapping[str, Any] | None = None
    """``None``: the function itself scores. Else it is called once, at the start of the child, with these plain values
    as keyword arguments and returns what scores."""
    setting: str = "task.verifier"
    """The setting that asks for it, as messages to the user name it."""
    start_timeout_s: float = 60.0
    """Limit of the import and of that one call."""
    names_function: bool = True
    """Whether the setting's value is the function; else it is one of ours that the user has not heard of."""
    sandbox: Sandbox | None = field(default_factory=Sandbox)
    """Limits of the child; ``None`` for our own code that needs the network, secrets or a model's memory."""


class Child:
    """A running worker; it leads a session of its own, so that all it starts can be killed with it.

    The socket is not its stdin or stdout, so whatever user code prints cannot get between the messages.

    Args:
        source: what it calls.
        search: folders that come first on the child's ``sys.path``.
        worker: module that the child runs.
    """

    def __init__(self, source: Source, search: Sequence[str], worker: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._outbox = bytearray()
        self._unpacker = Unpacker()
        self.gone = False
        """Its end of the socket is closed: the process has ended."""
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        descriptor = str(theirs.fileno())
        parameters = "" if source.parameters is None else json.dumps(dict(source.parameters))
        sandbox = source.sandbox
        limits = "" if sandbox is None else json.dumps(dataclasses.asdict(sandbox))
        env = dict(os.environ) if sandbox is None else sandbox.environment(os.environ)
        with theirs:
            # -P: a file of the user's must not take the place of a module of ours or of the standard library
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-P",
                    "-m",
                    worker,
                    descriptor,
                    str(os.getpid()),
                    source.function,
                    parameters,
                    limits,
                    *search,
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**env, "PYTHONPATH": path},
                start_new_session=True,
            )

    def fileno(self) -> int:
        """Descriptor that becomes readable with a reply or at the end of the process."""
        return self._socket.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether part of a message waits for room in the socket."""
        return bool(self._outbox)

    def send(self, message: bytes) -> None:
        """Queue a packed message and write what fits; the rest goes with the next :meth:`receive`."""
        self._outbox += message
        self._flush()

    def receive(self) -> list[Any]:
        """Messages that have arrived; sets ``gone`` at the end of the stream."""
        self._flush()
        messages: list[Any] = []
        while not self.gone:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                self.gone = True
            messages.extend(self._unpacker.feed(data))
        return messages

    def kill(self) -> None:
        """Kill the process and what it started, and close the socket; does not wait."""
        with contextlib.suppress(ProcessLookupError):  # ended and reaped already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._socket.close()

    def exit_code(self) -> int | None:
        """Kill it; how a process ended whose end of the socket is closed, negative for a signal; ``None``: unknown."""
        self.kill()
        return self._process.returncode if self.reap(_END_S) else None

    def reap(self, timeout_s: float = 0.0) -> bool:
        """Collect the exit status of a killed process; false if it is not there yet."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: self._socket.send(self._outbox)]
        except BlockingIOError:
            return
        except ConnectionError:
            self._outbox.clear()
