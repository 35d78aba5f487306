"""Verifiers in killable child processes: the parent owns the time limit and never waits for user code.

    submit ──► queue ──► idle worker ──┐ one call at a time      poll ◄── verdicts: ok │ bad_result │ error
                                       ▼                                           timeout │ died
                   child: actors.verifiers.worker ── user's f(prompts, completions, **columns)

A call that passes its limit is killed with everything that it started; the pool regrows when there is work. All of it
belongs to one thread: nothing here blocks except the constructor and ``wait``, and both have a deadline.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from actors.verifiers.child import Source
from actors.verifiers.child_pool import ChildPool, Worker
from actors.verifiers.wire import pack
from async_rl.errors import ConfigError
from async_rl.sandbox import Limit

Outcome = Literal["ok", "timeout", "error", "bad_result", "died"] | Limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one call."""

    key: int
    """As given to ``submit``."""
    rewards: list[float] | None
    """One per completion, NaN where the verifier gave NaN or None; ``None`` unless the outcome is ``ok``."""
    outcome: Outcome
    """``bad_result``: not a list of one finite number per completion; ``died``: the child ended or could not start; a
    limit: see :mod:`async_rl.sandbox`."""
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
class _Worker(Worker):
    call: _Call | None = None


class VerifierPool(ChildPool[_Worker, Verdict]):
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
        super().__init__(source, "actors.verifiers.worker", _Worker, search_dir)
        self._timeout_s, self._target = timeout_s, workers
        self._queue: deque[_Call] = deque()
        self._verdicts: list[Verdict] = []
        self.start_first()

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

    def close(self) -> None:
        """Kill all children; calls without a verdict get none."""
        super().close()
        self._queue.clear()

    def _pump(self) -> None:
        """Read replies, kill what is late or gone, hand out calls: everything that is possible without waiting."""
        self._collect()
        for worker in list(self._workers):
            self._hear(worker)
            if worker.ready:
                self._judge_call(worker)
            elif (failure := self._start_failure(worker)) is not None:
                self._kill(worker)
                if (
                    self._queue
                ):  # one call fails per failed start, so that a broken module ends the run and does not spin
                    self._conclude(self._queue.popleft(), "died", f"a new verifier process did not start: {failure}")
        self._hand_out()

    def _take(self, worker: _Worker, message: Any) -> None:
        if worker.call is not None:
            self._conclude(worker.call, message["outcome"], message["detail"], message["rewards"])
            worker.call = None
        worker.deadline = math.inf

    def _judge_call(self, worker: _Worker) -> None:
        late = time.monotonic() >= worker.deadline
        if not (late or worker.child.gone):
            return
        if worker.call is not None and worker.child.gone:
            self._conclude(worker.call, *self._end_of(worker, "verifier"))
        elif worker.call is not None:
            self._conclude(
                worker.call, "timeout", f"the verifier took longer than {self._timeout_s:g} s and was killed"
            )
        self._kill(worker)

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
