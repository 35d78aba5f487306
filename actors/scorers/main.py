"""A scorer: ``python -m actors.scorers.main CONFIG.toml --role reward|reference --connect tcp://HOST:PORT --name N``.

    server ──lease (groups)──► stage: reward sources or reference model ──annotate──► server
       ◄──────credit───────────┘

Added, ended or killed at any time: the server leases what a lost scorer held to another. Everything here runs in one
thread; only the client's socket and the children of the reward sources are elsewhere.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import Any

from actors.scorers.stage import Failure, Stage
from async_rl.client import Client
from async_rl.config import Config, load_config
from async_rl.curve import ClientKeys
from async_rl.data import Annotation, Group
from async_rl.process import run_guarded
from async_rl.protocol import STAGES
from async_rl.timer import StateTimer
from async_rl.wire import Header, decode_groups

CONNECT_TIMEOUT_S = 60.0
MAX_FAILURES = 16
"""So many groups in a row that cannot be annotated mean that the stage is broken: the run ends and says so."""


class Scorer:
    """Leases groups, has its stage annotate them, until the server says stop.

    Args:
        name: of this process.
        heartbeat_s: longest wait for anything.
    """

    def __init__(self, name: str, client: Client, stage: Stage, timer: StateTimer, heartbeat_s: float) -> None:
        self._name, self._client, self._stage, self._timer = name, client, stage, timer
        self._heartbeat_s = heartbeat_s
        self._held: dict[tuple[int, int], float] = {}
        """Since when it holds each group, by ordinal and attempt."""
        self._offered = 0
        self._failures_in_a_row = 0
        self._stop: Header | None = None
        self.counts = {"groups": 0, "failures": 0}

    # -- what the heartbeat says; read from the client's thread

    def in_flight(self) -> list[list[float]]:
        """``[ordinal, attempt, age in seconds]`` of every group held."""
        now = time.monotonic()
        return [[*key, round(now - since, 3)] for key, since in list(self._held.items())]

    def info(self) -> dict[str, Any]:
        """Groups annotated and failed so far."""
        return dict(self.counts)

    # -- the loop

    def run(self) -> Header:
        """Score until the server stops us; its ``stop``.

        Raises:
            DeadlineError: the server has gone silent.
            HandshakeError: the server has let us go.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._client.fileno(), selectors.EVENT_READ)
            while True:
                self._handle(self._client.receive(0.0))
                if self._stop is not None:
                    return self._stop
                self._timer.enter("scoring" if self._held else "idle")
                self._answer(self._stage.step())
                self._offer()
                if not self._stage.busy:
                    self._wait(selector)

    def _handle(self, messages: list[tuple[Header, list[Any]]]) -> None:
        for header, frames in messages:
            if header["type"] == "lease":
                for group in decode_groups(header, frames):
                    self._take(group)
            elif header["type"] == "ack":
                self._hear(header["results"])
            elif header["type"] == "stop":
                self._stop = header

    def _take(self, group: Group) -> None:
        self._offered = max(0, self._offered - 1)
        self._held[group.ordinal, group.attempt] = time.monotonic()
        self._stage.submit(group)

    def _hear(self, results: list[tuple[int, int, str, str]]) -> None:
        """What became of the annotations. One that is refused was no use, though the stage believed that it was."""
        for ordinal, attempt, outcome, reason in results:
            if outcome == "accepted" or (outcome, reason) == ("filtered", "zero_variance"):
                self._failures_in_a_row = 0
            elif outcome == "refused":
                self._count_failure(reason, f"the server refused what was added to ordinal {ordinal} attempt {attempt}")

    def _answer(self, results: list[Annotation | Failure]) -> None:
        annotations = [result for result in results if isinstance(result, Annotation)]
        if annotations:
            self.counts["groups"] += len(annotations)
            self._client.send_annotations(annotations)
        for annotation in annotations:
            self._held.pop((annotation.ordinal, annotation.attempt), None)
        for result in results:
            if isinstance(result, Failure):
                self._fail(result)

    def _fail(self, failure: Failure) -> None:
        group = failure.group
        self._held.pop((group.ordinal, group.attempt), None)
        self._client.send(
            "fail",
            ordinal=group.ordinal,
            attempt=group.attempt,
            reason=failure.reason,
            detail=failure.detail[-2000:],
            final=True,
        )
        self._count_failure(failure.reason, failure.detail)

    def _count_failure(self, reason: str, detail: str) -> None:
        self.counts["failures"] += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row == MAX_FAILURES:
            self._client.send(
                "fatal",
                reason=f"{self._name}: {MAX_FAILURES} groups in a row could not be scored ({reason}); "
                f"the last: {detail}",
            )

    def _offer(self) -> None:
        """Tell the server how many groups we could take now; only when that number has grown."""
        count = max(0, self._stage.wanted - len(self._held))
        if count > self._offered:
            self._offered = count
            self._client.send("credit", count=count)

    def _wait(self, selector: selectors.BaseSelector) -> None:
        """Sleep until something happens or a call passes its limit, at most one heartbeat."""
        self._timer.enter("scoring" if self._held else "idle")
        children = [selector.register(d, selectors.EVENT_READ) for d in self._stage.filenos()]
        due = self._stage.next_deadline
        patience_s = self._heartbeat_s
        selector.select(patience_s if due is None else min(patience_s, max(0.0, due - time.monotonic())))
        for key in children:
            selector.unregister(key.fileobj)


def make_stage(config: Config, role: str, search: Path) -> Stage:
    """The stage of a role, with its models loaded and its children started.

    Raises:
        ConfigError: a model, a source or the data is wrong.
    """
    if role == "reference":
        from actors.scorers.reference import ReferenceStage, load_reference

        return ReferenceStage(load_reference(config), config.sampling.temperature, config.learner.micro_batch_tokens)
    from actors.rewards.pool import make_reward_pool
    from actors.scorers.reward import RewardStage
    from async_rl.models import load_tokenizer, resolve_model, stop_token_ids
    from async_rl.tasks import load_task
    from async_rl.tasks.prompt import decode_completion

    folder = resolve_model(config.model.path)
    tokenizer, stops = load_tokenizer(folder), stop_token_ids(folder)
    data = load_task(config.task, config.seed)
    return RewardStage(
        make_reward_pool(config, data.verifier, search),
        config.task.verifiers,
        data.train,
        lambda ids: decode_completion(tokenizer, ids, stops),
    )


def main() -> None:
    """Parse the command line, load the stage, score until stopped."""
    parser = argparse.ArgumentParser(description="one scorer: rewards, or log-probabilities of the reference")
    parser.add_argument("config")
    parser.add_argument("--role", required=True, choices=STAGES)
    parser.add_argument("--connect", required=True, help="address of the buffer server, tcp://HOST:PORT")
    parser.add_argument("--name")
    args = parser.parse_args()
    name = args.name or f"{args.role}-{os.getpid()}"
    config = load_config(args.config)
    timer = StateTimer()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher turns Ctrl-C into an orderly stop
    keys = ClientKeys.of(config.buffer.keys)
    with Client(args.connect, "scorer", name, config.contract_hash(), stage=args.role, keys=keys) as client:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        client.beat_info = lambda: {"timer": timer.drain()}
        client.connect(CONNECT_TIMEOUT_S)
        stage = make_stage(config, args.role, Path(args.config).parent)
        scorer = Scorer(name, client, stage, timer, config.buffer.heartbeat_s)
        client.beat_info = lambda: {"timer": timer.drain(), "in_flight": scorer.in_flight(), "info": scorer.info()}
        began = time.monotonic()
        try:
            stop = scorer.run()
        finally:
            stage.close()
    print(f"{name}: stopped after {time.monotonic() - began:.1f} s ({stop['reason']}): {scorer.counts}", flush=True)
    if stop["error"]:
        sys.exit(1)


if __name__ == "__main__":
    run_guarded(main)
