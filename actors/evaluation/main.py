"""Held-out evaluation: greedy, each time with one pinned version, in a process of its own that never pauses anybody.

    server ──version──► receiver ──► engine (torch) ◄──► exam: greedy answers ──► eval(version, metrics) ──► server

Versions that need no evaluation are passed over; when several wait, the newest is taken, so the last is never missed.
"""

from __future__ import annotations

import argparse
import contextlib
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from actors.engines.base import Engine
from actors.engines.factory import make_engine
from actors.evaluation.exam import Exam, judged_by_verifier, make_exam
from actors.main import CONNECT_TIMEOUT_S
from actors.players.factory import Setting
from actors.receiver import Prepared, Receiver
from async_rl.client import Client
from async_rl.config import Config, load_config
from async_rl.data import is_correct
from async_rl.errors import AsyncRLError, WeightsError
from async_rl.evaluation import is_evaluated
from async_rl.models import resolve_model
from async_rl.process import run_guarded
from async_rl.tasks import load_task
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest


class Stopped(Exception):
    """The server said stop."""


class Evaluator:
    """Waits for versions, evaluates those that need it, sends what it found."""

    def __init__(
        self, config: Config, client: Client, engine: Engine, receiver: Receiver, exam: Exam, timer: StateTimer
    ) -> None:
        self._config, self._client, self._engine = config, client, engine
        self._receiver, self._exam, self._timer = receiver, exam, timer
        self._start: int | None = None

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
        if is_evaluated(self._config, manifest.version, self._start):
            self._receiver.fetch(manifest)

    def _evaluate(self, prepared: Prepared) -> None:
        began = time.monotonic()
        with self._timer.during("committing"):
            try:
                checksum = self._engine.load_weights(prepared.manifest, prepared.data)
            except WeightsError as error:  # overwritten by a newer evaluated version, which is announced already
                print(f"evaluator: version {prepared.manifest.version} passed over: {error}", flush=True)
                return
        version = prepared.manifest.version
        self._client.send(
            "live",
            version=version,
            checksum=checksum,
            transfer_s=prepared.transfer_s,
            commit_s=time.monotonic() - began,
        )
        with self._timer.during("evaluating"):
            marks = self._exam.take(self._messages)
        self._client.send(
            "eval",
            version=version,
            metrics={
                "accuracy": float(is_correct(np.asarray(marks.rewards)).mean()),
                "reward": float(np.mean(marks.rewards)),
                "problems": len(marks.rewards),
                **marks.metrics,
                "wall_s": time.monotonic() - began,
            },
            samples=marks.samples,
        )


def main() -> None:
    """Parse the command line, build the parts, evaluate until stopped."""
    parser = argparse.ArgumentParser(description="held-out evaluation")
    parser.add_argument("config")
    parser.add_argument("--connect", required=True, help="address of the buffer server, tcp://HOST:PORT")
    parser.add_argument("--name", default="evaluator")
    args = parser.parse_args()
    config = load_config(args.config)
    # the embedded engine always: greedy answers need neither a second vLLM nor its start-up
    embedded = config.model_copy(
        update={"actors": config.actors.model_copy(update={"engine": "torch", "slots": min(config.actors.slots, 256)})}
    )
    timer = StateTimer()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Client(args.connect, "evaluator", args.name, config.contract_hash()) as client:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        client.beat_info = lambda: {"timer": timer.drain()}
        welcome = client.connect(CONNECT_TIMEOUT_S)
        folder = resolve_model(config.model.path)
        data = load_task(config.task, config.seed)
        setting = Setting(
            config=judged_by_verifier(config), folder=folder, verifier=data.verifier, search=Path(args.config).parent
        )
        with contextlib.ExitStack() as stack:
            engine = make_engine(embedded, folder, args.name)
            stack.callback(engine.close)
            exam = make_exam(setting, engine, data.heldout[: config.eval.problems])
            stack.callback(exam.close)
            receiver = Receiver(config.weights.path, welcome["weights_address"], welcome["run_id"])
            stack.callback(receiver.close)
            manifest = welcome.get("manifest")
            Evaluator(config, client, engine, receiver, exam, timer).run(
                Manifest.from_wire(manifest) if manifest else None, welcome["start_version"]
            )


if __name__ == "__main__":
    run_guarded(main)
