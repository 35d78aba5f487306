"""The evaluator's loop, the same for all domains: each time one pinned version, in a process that never pauses anybody.

server ──version──► receiver ──► holder of weights ◄──► exam ──► eval(version, metrics) ──► server

Versions that need no evaluation are passed over; when several wait, the newest is taken, so the last is never missed.
What an exam found is dropped when its version became void meanwhile: the learner has begun anew before it.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from actors.prepared import Prepared
from actors.receiver import Receiver
from actors.swap import Holder
from async_rl.client import Client
from async_rl.config import RunConfig
from async_rl.errors import AsyncRLError, WeightsError
from async_rl.evaluation import is_evaluated
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest


class Stopped(Exception):
    """The server said stop."""


@dataclass(frozen=True, slots=True)
class Result:
    """What an exam gave."""

    metrics: dict[str, float]
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Some of it as text."""


Exam = Callable[[Callable[[], None]], Result]
"""Examines the weights that the holder has; calls its argument between two steps, which may raise."""


class Evaluator:
    """Waits for versions, evaluates those that need it, sends what it found."""

    def __init__(
        self, config: RunConfig, client: Client, holder: Holder, receiver: Receiver, exam: Exam, timer: StateTimer
    ) -> None:
        self._config, self._client, self._holder = config, client, holder
        self._receiver, self._exam, self._timer = receiver, exam, timer
        self._start: int | None = None
        self._examined: Manifest | None = None
        """None also once it is void."""

    def run(self, first: Manifest | None, start_version: int | None) -> None:
        """Evaluate until the server stops us.

        Args:
            first: newest version to evaluate at the handshake, or None.
            start_version: first version of the run; None: it is announced later.
        """
        self._start = start_version
        if first is not None:
            self._announce(first)
        try:
            for prepared in self._prepared():
                self._evaluate(prepared)
        except Stopped:
            return

    def _prepared(self) -> Iterator[Prepared]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._client.fileno(), selectors.EVENT_READ)
            selector.register(self._receiver.fileno(), selectors.EVENT_READ)
            while True:
                self._messages()
                prepared = self._receiver.ready()
                if prepared is not None:
                    yield prepared
                    continue
                self._timer.enter("idle")
                selector.select(self._config.buffer.heartbeat_s)

    def _messages(self) -> None:
        for header, _ in self._client.receive(0.0):
            if header["type"] == "version":
                self._announce(Manifest.from_wire(header["manifest"]))
            elif header["type"] == "stop":
                if header["error"]:
                    raise AsyncRLError(str(header["reason"]))
                raise Stopped

    def _announce(self, manifest: Manifest) -> None:
        if self._start is None:
            self._start = manifest.version
        examined = self._examined
        if examined is not None and manifest.epoch > examined.epoch and manifest.version < examined.version:
            self._examined = None
        if is_evaluated(self._config, manifest.version, self._start):
            self._receiver.fetch(manifest)

    def _evaluate(self, prepared: Prepared) -> None:
        began = time.monotonic()
        with self._timer.during("paused"):
            try:
                checksum = self._holder.load_weights(prepared.manifest, prepared.data)
            except WeightsError as error:  # overwritten by a newer evaluated version, which is announced already
                print(f"evaluator: version {prepared.manifest.version} passed over: {error}", flush=True)
                return
        version = prepared.manifest.version
        self._client.send(
            "live",
            epoch=prepared.manifest.epoch,
            version=version,
            checksum=checksum,
            transfer_s=prepared.transfer_s,
            commit_s=time.monotonic() - began,
            received=dict(prepared.received),
        )
        self._examined = prepared.manifest
        with self._timer.during("evaluating"):
            result = self._exam(self._messages)
        if self._examined is None:
            print(f"evaluator: version {version} is void, the learner has begun anew before it", flush=True)
            return
        self._examined = None
        self._client.send(
            "eval",
            epoch=prepared.manifest.epoch,
            version=version,
            metrics={**result.metrics, "wall_s": time.monotonic() - began},
            samples=result.samples,
        )
