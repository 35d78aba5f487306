"""Environments in killable child processes: many episodes in each, one call at a time in an episode.

    open, act ──► child of the episode: actors.environments.worker ── reset, act ──► poll: ok │ error │ bad_result
                                                                                      timeout │ died │ lost

A call that awaits for longer than the limit is given up by the child alone. A child that owes replies and gives none
for that long is blocked by user code: it is killed with all it started, and its episodes end, ``timeout`` for those in
a call (which of them blocks cannot be told), ``lost`` for those that waited for the model. Children that end by
themselves give ``died`` in place of ``timeout``. The pool regrows with the next episode. All of it belongs to one
thread: nothing here blocks except the constructor and ``wait``, and both have a deadline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from actors.environments.base import Turn
from actors.verifiers.child import Source
from actors.verifiers.child_pool import ChildPool, Worker
from actors.verifiers.wire import pack
from async_rl.sandbox import Limit, Sandbox

Outcome = Literal["ok", "timeout", "error", "bad_result", "died", "lost"] | Limit

_GRACE_S = 1.0
"""Added to the limit of a silent child: it gives up what merely awaits before that."""
_SANDBOX = Sandbox()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What became of one call."""

    episode: int
    turn: Turn | None
    """After ``open``: its first observation; ``None`` unless the outcome is ``ok``."""
    outcome: Outcome
    """``lost``: the child was killed for another's fault. After anything but ``ok`` the episode is over."""
    detail: str
    """For people: the end of the traceback, what was wrong with the result, which limit was passed."""


@dataclass(slots=True)
class _Worker(Worker):
    episodes: set[int] = field(default_factory=set)
    calls: set[int] = field(default_factory=set)
    """Episodes that are owed a reply."""
    outbox: list[bytes] = field(default_factory=list)


class EnvironmentPool(ChildPool[_Worker, Reply]):
    """At most ``workers`` child processes that play episodes.

    Args:
        environment: as ``task.environment``.
        timeout_s: limit of one call; the import of the module is not part of it.
        workers: most child processes; the second is started with the second episode.
        search_dir: folder that comes first in the search for the module, then the working directory.
        sandbox: limits of each child.

    Raises:
        ConfigError: the environment cannot be imported or made; says why.
    """

    def __init__(
        self,
        environment: str,
        timeout_s: float,
        workers: int,
        search_dir: Path | None = None,
        sandbox: Sandbox = _SANDBOX,
    ) -> None:
        parameters = {"timeout_s": timeout_s}
        source = Source(function=environment, parameters=parameters, setting="task.environment", sandbox=sandbox)
        super().__init__(source, "actors.environments.worker", _Worker, search_dir)
        self._timeout_s, self._target = timeout_s, workers
        self._home: dict[int, _Worker] = {}
        self._replies: list[Reply] = []
        self._opened = 0
        self.start_first()

    @property
    def pending(self) -> int:
        """Calls whose reply was not fetched yet."""
        return sum(len(w.calls) for w in self._workers) + len(self._replies)

    def open(self, columns: Mapping[str, Any], seed: int) -> int:
        """Begin an episode; its number. Messages leave with the next :meth:`poll`."""
        episode, self._opened = self._opened, self._opened + 1
        worker = self._least_busy()
        worker.episodes.add(episode)
        self._home[episode] = worker
        self._call(worker, episode, {"do": "reset", "columns": dict(columns), "seed": seed})
        return episode

    def act(self, episode: int, text: str) -> None:
        """Hand the model's answer to the episode, which is owed no reply at the moment."""
        if (worker := self._home.get(episode)) is not None:  # else its end waits to be fetched
            self._call(worker, episode, {"do": "act", "text": text})

    def drop(self, episode: int) -> None:
        """End an episode, in the middle of a call too; one that is over already is let be."""
        worker = self._home.pop(episode, None)
        if worker is not None:
            worker.episodes.discard(episode)
            worker.calls.discard(episode)
            worker.outbox.append(pack({"episode": episode, "do": "close"}))
            self._watch(worker)
        self._replies = [r for r in self._replies if r.episode != episode]

    def poll(self) -> list[Reply]:
        """Replies that are there by now, without waiting."""
        self._collect()
        for worker in list(self._workers):
            self._pump(worker)
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        """Kill all children; calls without a reply get none."""
        super().close()
        self._home = {}

    def _least_busy(self) -> _Worker:
        if all(w.episodes for w in self._workers) and len(self._workers) < self._target:
            return self._spawn()
        return min(self._workers, key=lambda w: len(w.episodes))

    def _call(self, worker: _Worker, episode: int, fields: Mapping[str, Any]) -> None:
        worker.outbox.append(pack({"episode": episode, **fields}))
        worker.calls.add(episode)
        self._watch(worker)

    def _watch(self, worker: _Worker, *, heard: bool = False) -> None:
        """Set the deadline of the next reply, from the first call or the last sign of life."""
        if not worker.ready:
            return
        if not worker.calls:
            worker.deadline = math.inf
        elif heard or worker.deadline == math.inf:
            worker.deadline = time.monotonic() + self._timeout_s + _GRACE_S

    def _pump(self, worker: _Worker) -> None:
        """Write, read, and end the worker if it is late or gone."""
        if worker.outbox:
            worker.child.send(b"".join(worker.outbox))
            worker.outbox.clear()
        self._hear(worker)
        if not worker.ready:
            failure = self._start_failure(worker)
            if failure is not None:
                self._end(worker, "died", f"a new environment process did not start: {failure}")
        elif worker.child.gone:
            self._end(worker, *self._end_of(worker, "environment"))
        elif time.monotonic() >= worker.deadline:
            detail = f"the environment blocked its process for longer than {self._timeout_s:g} s and was killed"
            self._end(worker, "timeout", detail)

    def _hear(self, worker: _Worker) -> None:
        super()._hear(worker)
        if worker.ready and worker.deadline == math.inf:  # calls that had waited for its start
            self._watch(worker)

    def _take(self, worker: _Worker, message: Any) -> None:
        episode = message["episode"]
        if episode in worker.calls:
            worker.calls.discard(episode)
            outcome = message["outcome"]
            turn = Turn(message["observation"], message["reward"], message["done"]) if outcome == "ok" else None
            if turn is None:
                self.drop(episode)
            detail = message.get("detail", "")
            self._replies.append(Reply(episode=episode, turn=turn, outcome=outcome, detail=detail))
        self._watch(worker, heard=True)

    def _end(self, worker: _Worker, outcome: Outcome, detail: str) -> None:
        """Kill a worker and all its episodes."""
        self._kill(worker)
        for episode in sorted(worker.episodes, key=lambda e: (e not in worker.calls, e)):  # suspects come first
            del self._home[episode]
            kind: Outcome = outcome if episode in worker.calls else "lost"
            self._replies.append(Reply(episode=episode, turn=None, outcome=kind, detail=detail))
