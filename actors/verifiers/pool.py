"""Verifiers in killable child processes: the parent owns the time limit and never waits for user code.

    submit ──► queue ──► idle worker ──┐ one call at a time      poll ◄── verdicts: ok │ bad_result │ error
                                       ▼                                           timeout │ died
                   child: actors.verifiers.worker ── user's f(prompts, completions, **columns)

A call that passes its limit is killed with everything that it started; the pool regrows when there is work. All of it
belongs to one thread: nothing here blocks except the constructor and ``wait``, and both have a deadline.
"""

from __future__ import annotations

import math
import select
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from actors.verifiers.child import Child, Source
from actors.verifiers.wire import pack
from async_rl.errors import ConfigError

Outcome = Literal["ok", "timeout", "error", "bad_result", "died"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one call."""

    key: int
    """As given to ``submit``."""
    rewards: list[float] | None
    """One per completion, NaN where the verifier gave NaN or None; ``None`` unless the outcome is ``ok``."""
    outcome: Outcome
    """``bad_result``: not a list of one finite number per completion; ``died``: the child ended or could not start."""
    detail: str
    """For people: the end of the traceback, what was wrong with the result, which limit was passed."""

    @property
    def fault(self) -> tuple[str, str] | None:
        """Why nothing can be trained on it, slug and detail: the outcome, or ``bad_reward`` if one is not finite."""
        if self.outcome != "ok":
            return self.outcome, self.detail
        if all(math.isfinite(reward) for reward in self.rewards or []):
            return None
        return "bad_reward", f"rewards {self.rewards} are not all finite"


@dataclass(slots=True)
class _Call:
    key: int
    message: bytes


@dataclass(slots=True)
class _Worker:
    child: Child
    deadline: float
    """``time.monotonic()`` at which the start, then the call, is late; infinite while there is nothing to do."""
    ready: bool = False
    load_error: str = ""
    call: _Call | None = None


class VerifierPool:
    """At most ``workers`` child processes that score completions.

    Args:
        verifier: ``module:function``, or a source with more to say.
        timeout_s: limit of one call; the import of the module is not part of it.
        workers: most child processes; the second is started when two calls wait.
        search_dir: folder that comes first in the search for the module, then the working directory.

    Raises:
        ConfigError: the module or the function cannot be imported; says why.
    """

    def __init__(self, verifier: str | Source, timeout_s: float, workers: int, search_dir: Path | None = None) -> None:
        source = Source(function=verifier) if isinstance(verifier, str) else verifier
        module, colon, function = source.function.partition(":")
        if not (module and colon and function):
            raise ConfigError(f"{source.setting} = {source.function!r}: write it as module:function")
        self._source, self._timeout_s, self._target = source, timeout_s, workers
        self._search = [str(p.resolve()) for p in (search_dir, Path()) if p is not None]
        self._queue: deque[_Call] = deque()
        self._workers: list[_Worker] = []
        self._killed: list[Child] = []
        self._verdicts: list[Verdict] = []
        self._start_first_worker()

    @property
    def pending(self) -> int:
        """Calls whose verdict was not fetched yet."""
        return len(self._queue) + sum(w.call is not None for w in self._workers) + len(self._verdicts)

    def submit(
        self, key: int, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> None:
        """Queue a call ``f(prompts=..., completions=..., **columns)``; every list has one entry per completion."""
        message = pack({"prompts": list(prompts), "completions": list(completions), "columns": dict(columns)})
        self._queue.append(_Call(key, message))
        self._pump()

    def poll(self) -> list[Verdict]:
        """Verdicts that are there by now, without waiting."""
        self._pump()
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def wait(self, timeout_s: float) -> list[Verdict]:
        """Wait for the next verdicts; empty when nothing is pending or ``timeout_s`` has passed."""
        deadline = time.monotonic() + timeout_s
        while not (verdicts := self.poll()) and self.pending:
            now = time.monotonic()
            if now >= deadline:
                break
            self._select(min([deadline, *(w.deadline for w in self._workers)]) - now)
        return verdicts

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
        """``time.monotonic()`` at which ``poll`` must be called at the latest, to kill a call that passes its limit."""
        return min((w.deadline for w in self._workers if w.deadline < math.inf), default=None)

    def close(self) -> None:
        """Kill all children; calls without a verdict get none."""
        for worker in self._workers:
            worker.child.kill()
        for child in [*self._killed, *(w.child for w in self._workers)]:
            child.reap(timeout_s=5.0)
        self._workers, self._killed = [], []
        self._queue.clear()

    def _start_first_worker(self) -> None:
        worker = self._spawn()
        try:
            while not worker.ready:
                self._select(worker.deadline - time.monotonic())
                self._hear(worker)
                if (failure := self._start_failure(worker)) is not None:
                    source = self._source
                    what = f" = {source.function!r}" if source.parameters is None else ""
                    raise ConfigError(f"{source.setting}{what}: {failure}")
        except ConfigError:
            self.close()
            raise

    def _pump(self) -> None:
        """Read replies, kill what is late or gone, hand out calls: everything that is possible without waiting."""
        self._killed = [child for child in self._killed if not child.reap()]
        for worker in list(self._workers):
            self._hear(worker)
            if worker.ready:
                self._judge_call(worker)
            elif (failure := self._start_failure(worker)) is not None:
                self._drop(worker)
                if (
                    self._queue
                ):  # fail one call per failed start, so that a broken module ends the run and does not spin
                    self._conclude(self._queue.popleft(), "died", f"a new verifier process did not start: {failure}")
        self._hand_out()

    def _hear(self, worker: _Worker) -> None:
        for message in worker.child.receive():
            if not worker.ready:
                worker.ready, worker.load_error = bool(message["ok"]), message["detail"]
            elif worker.call is not None:
                self._conclude(worker.call, message["outcome"], message["detail"], message["rewards"])
                worker.call = None
            worker.deadline = math.inf

    def _start_failure(self, worker: _Worker) -> str | None:
        if worker.load_error:
            return worker.load_error
        if worker.child.gone:
            return "the process ended while it imported the module"
        if time.monotonic() >= worker.deadline:
            return f"the import took longer than {self._source.start_timeout_s:.0f} s"
        return None

    def _judge_call(self, worker: _Worker) -> None:
        late = time.monotonic() >= worker.deadline
        if not (late or worker.child.gone):
            return
        if worker.call is not None and worker.child.gone:
            self._conclude(worker.call, "died", "the verifier ended its process")
        elif worker.call is not None:
            self._conclude(
                worker.call, "timeout", f"the verifier took longer than {self._timeout_s:g} s and was killed"
            )
        self._drop(worker)

    def _conclude(self, call: _Call, outcome: Outcome, detail: str, rewards: list[float] | None = None) -> None:
        self._verdicts.append(Verdict(key=call.key, rewards=rewards, outcome=outcome, detail=detail))

    def _hand_out(self) -> None:
        for worker in self._workers:
            if self._queue and worker.ready and worker.call is None:
                worker.call = self._queue.popleft()
                worker.deadline = time.monotonic() + self._timeout_s
                worker.child.send(worker.call.message)
        starting = sum(not w.ready for w in self._workers)
        for _ in range(min(self._target - len(self._workers), len(self._queue) - starting)):
            self._spawn()

    def _spawn(self) -> _Worker:
        worker = _Worker(Child(self._source, self._search), time.monotonic() + self._source.start_timeout_s)
        self._workers.append(worker)
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.child.kill()
        self._workers.remove(worker)
        self._killed.append(worker.child)

    def _select(self, timeout_s: float) -> None:
        poller = select.poll()
        self.watch(poller)
        poller.poll(max(0.0, timeout_s) * 1_000)
