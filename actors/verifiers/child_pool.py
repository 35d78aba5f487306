"""What pools of killable child processes share: start, listen, kill, collect, and the descriptors to wait for.

VerifierPool, EnvironmentPool ── what is called, and what a late or ended child means
        └── ChildPool ── Worker × N ── Child: process, socket
"""

from __future__ import annotations

import math
import select
import signal
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from actors.verifiers.child import Child, Source
from async_rl.errors import ConfigError
from async_rl.sandbox import Limit

_STARTS = 3
"""Children that may be killed one after the other before it is no accident; other failures are told at once."""


@dataclass(slots=True)
class Worker:
    """One child as its pool sees it; pools add what it works on."""

    child: Child
    deadline: float
    """``time.monotonic()`` at which the start, then the reply that is owed, is late; infinite while none is."""
    ready: bool = False
    load_error: str = ""


W = TypeVar("W", bound=Worker)
R = TypeVar("R")


class ChildPool(ABC, Generic[W, R]):
    """Child processes that run the user's code, and the replies ``R`` that were not fetched yet.

    All of it belongs to one thread; nothing here blocks but :meth:`start_first` and :meth:`wait`, which have deadlines.

    Args:
        source: what the children call.
        module: that they run.
        worker: makes a pool's worker of a child and its deadline.
        search_dir: folder that comes first in the search for the user's module, then the working directory.
    """

    def __init__(self, source: Source, module: str, worker: type[W], search_dir: Path | None) -> None:
        self._source, self._module, self._worker = source, module, worker
        self._search = [str(p.resolve()) for p in (search_dir, Path()) if p is not None]
        self._workers: list[W] = []
        self._killed: list[Child] = []

    @property
    @abstractmethod
    def pending(self) -> int:
        """Calls whose reply was not fetched yet."""

    @abstractmethod
    def poll(self) -> list[R]:
        """Replies that are there by now, without waiting."""

    @abstractmethod
    def _take(self, worker: W, message: Any) -> None:
        """A reply of a child that is ready."""

    def wait(self, timeout_s: float) -> list[R]:
        """Wait for the next replies; empty when nothing is pending or ``timeout_s`` has passed."""
        deadline = time.monotonic() + timeout_s
        while not (replies := self.poll()) and self.pending:
            now = time.monotonic()
            if now >= deadline:
                break
            self._select(min([deadline, *(w.deadline for w in self._workers)]) - now)
        return replies

    def filenos(self) -> list[int]:
        """Descriptors that become readable when ``poll`` has something to do; they change as children come and go."""
        return [w.child.fileno() for w in self._workers]

    def watch(self, poller: select.poll) -> None:
        """Register all children: to be read (an ended one counts as readable), and written where that is due."""
        for worker in self._workers:
            writing = select.POLLOUT if worker.child.wants_to_write else 0
            poller.register(worker.child.fileno(), select.POLLIN | writing)

    @property
    def next_deadline(self) -> float | None:
        """``time.monotonic()`` at which ``poll`` must be called at the latest, to kill a child that is late."""
        return min((w.deadline for w in self._workers if w.deadline < math.inf), default=None)

    def close(self) -> None:
        """Kill all children; calls without a reply get none."""
        for worker in self._workers:
            worker.child.kill()
        for child in [*self._killed, *(w.child for w in self._workers)]:
            child.reap(timeout_s=5.0)
        self._workers, self._killed = [], []

    def start_first(self) -> None:
        """Start one child and wait until it has imported the user's module; one that somebody kills is tried again.

        Raises:
            ConfigError: it cannot; says why. No child is left then.
        """
        for tries_left in reversed(range(_STARTS)):
            worker = self._spawn()
            while not worker.ready and (failure := self._start_failure(worker)) is None:
                self._select(worker.deadline - time.monotonic())
                self._hear(worker)
            if worker.ready:
                return
            if not (tries_left and worker.child.gone and not worker.load_error and self._was_killed(worker)):
                break
            self._kill(worker)
        self.close()
        what = f" = {self._source.function!r}" if self._source.names_function else ""
        raise ConfigError(f"{self._source.setting}{what}: {failure}")

    def _spawn(self) -> W:
        child = Child(self._source, self._search, self._module)
        worker = self._worker(child, time.monotonic() + self._source.start_timeout_s)
        self._workers.append(worker)
        return worker

    def _hear(self, worker: W) -> None:
        for message in worker.child.receive():
            if worker.ready:
                self._take(worker, message)
            else:
                worker.ready, worker.load_error = bool(message["ok"]), message["detail"]
                worker.deadline = math.inf

    def _start_failure(self, worker: W) -> str | None:
        if worker.load_error:
            return worker.load_error
        if worker.ready:
            return None
        if worker.child.gone:
            return "the process ended while it imported the module"
        if time.monotonic() >= worker.deadline:
            return f"the import took longer than {self._source.start_timeout_s:.0f} s"
        return None

    def _was_killed(self, worker: W) -> bool:
        """Whether a child that is gone was ended by a signal that none of its limits explains."""
        code, sandbox = worker.child.exit_code(), self._source.sandbox
        return code is not None and code < 0 and (sandbox is None or sandbox.fatal_limit(code) is None)

    def _end_of(self, worker: W, who: str) -> tuple[Limit | Literal["died"], str]:
        """Why a child is gone, outcome and detail; it is killed, if it lives on without its socket."""
        code = worker.child.exit_code()
        sandbox = self._source.sandbox
        if sandbox is not None and (limit := sandbox.fatal_limit(code)) is not None:
            return limit[0], f"the {who} {limit[1]}"
        if code is None or code == -signal.SIGKILL:
            return "died", f"the {who} ended its process"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return "died", f"the {who} ended its process ({how})"

    def _kill(self, worker: W) -> None:
        worker.child.kill()
        self._workers.remove(worker)
        self._killed.append(worker.child)

    def _collect(self) -> None:
        """Take the exit status of those that were killed."""
        self._killed = [child for child in self._killed if not child.reap()]

    def _select(self, timeout_s: float) -> None:
        poller = select.poll()
        self.watch(poller)
        poller.poll(max(0.0, timeout_s) * 1_000)
