"""A scorer: ``python -m actors.scorers.main CONFIG.toml --role reward|reference --connect tcp://HOST:PORT --name N``.

    server ──lease (groups)──► stage: reward sources or reference model ──annotate──► server
       ◄──────credit───────────┘

Added, ended or killed at any time: the server leases what a lost scorer held to another. Everything here runs in one
thread; only the client's socket and the children of the reward sources are elsewhere.
"""

from __future__ import annotations

import os
import selectors
import time
from pathlib import Path
from typing import Any

from actors.credit import Credit
from actors.process import Stop, command_line, joined
from actors.scorers.stage import Failure, Stage
from actors.streak import MAX_FAILURES, Streak, is_useful
from async_rl.client import Client
from async_rl.config import Config, load_config
from async_rl.data import Annotation, Group
from async_rl.process import run_guarded
from async_rl.protocol import STAGES
from async_rl.timer import StateTimer
from async_rl.wire import Header, decode_groups


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
        self._credit = Credit(client)
        self._failures = Streak(client, f"{name}: {MAX_FAILURES} groups in a row could not be scored")
        """Of the stage, by its own word or the server's."""
        self._stop: Stop | None = None
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

    def run(self) -> Stop:
        """Score until the server stops us.

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
                self._credit.offer(self._stage.wanted - len(self._held))
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
                self._stop = Stop.from_wire(header)

    def _take(self, group: Group) -> None:
        self._credit.use(1)
        self._held[group.ordinal, group.attempt] = time.monotonic()
        self._stage.submit(group)

    def _hear(self, results: list[tuple[int, int, str, str]]) -> None:
        """What became of the annotations. One that is refused was no use, though the stage believed that it was."""
        for ordinal, attempt, outcome, reason in results:
            if is_useful(outcome, reason):
                self._failures.clear()
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
        self._failures.add(reason, detail)

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
    parser = command_line("one scorer: rewards, or log-probabilities of the reference", None)
    parser.add_argument("--role", required=True, choices=STAGES)
    args = parser.parse_args()
    config = load_config(args.config)
    name = args.name or f"{args.role}-{os.getpid()}"
    with joined("scorer", config, args.connect, name, stage=args.role) as process:
        stage = make_stage(config, args.role, Path(args.config).parent)
        process.parts.callback(stage.close)
        scorer = Scorer(name, process.client, stage, process.timer, config.buffer.heartbeat_s)
        process.run(scorer, scorer.run)


if __name__ == "__main__":
    run_guarded(main)
