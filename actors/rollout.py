"""The rollout loop of one actor: tickets in, scored groups out, weights swapped between two decode steps.

    server ──tickets──► engine ──completions──► verifier pool ──rewards──► group ──submit──► server
       └────version───► receiver (prepares in its thread) ──► engine.load_weights ──live──► server

| part           | consumes      | produces        | waits for                  | unblocked by                    |
|----------------|---------------|-----------------|----------------------------|---------------------------------|
| ``_handle``      | messages      | requests        | nothing                    |                                 |
| ``_commit``      | prepared weights | ``live``       | nothing                    |                                 |
| ``_generate``    | requests      | completions     | one decode step            | the engine                      |
| ``_score``       | verdicts      | groups          | nothing                    |                                 |
| ``_wait``        | nothing       | nothing         | any descriptor, a heartbeat | message, weights, verdict, token |

Everything runs in one thread; only the client's socket, the receiver's transfers and the verifiers are elsewhere.
"""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.engines.base import Completion, Engine, Request
from actors.receiver import Prepared, Receiver
from actors.verify import Verdict, VerifierPool
from async_rl.client import Client
from async_rl.config import Config
from async_rl.data import make_group, token_trajectory
from async_rl.errors import WeightsError
from async_rl.protocol import Ticket
from async_rl.tasks import Problem
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest
from async_rl.wire import Header

MAX_VERIFIER_FAILURES = 16
"""So many failed verifier calls in a row mean that the verifier itself is broken: the run ends and says so."""
MAX_REFUSED = 256
"""So many prompts in a row that the engine refuses mean that hardly any fits the model: the run ends and says so."""
MAX_COMMIT_FAILURES = 5
"""So many weight versions in a row whose read-back failed mean that the engine cannot hold them."""

SAMPLE_CHARACTERS = 1 << 18
"""Most characters of a group's text that are sent along: it travels in the header, whose size is limited."""


@dataclass(slots=True)
class Work:
    """One ticket while this actor holds it."""

    ticket: Ticket
    problem: Problem
    prompt: tuple[int, ...]
    since: float
    completions: list[Completion] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the loop ended."""

    reason: str
    error: bool


class Rollout:
    """Drives one engine until the server says stop.

    Args:
        encode: problem to prompt ids.
        decode: completion ids to the text that is verified.
    """

    def __init__(
        self,
        *,
        config: Config,
        name: str,
        client: Client,
        engine: Engine,
        receiver: Receiver,
        verifiers: VerifierPool,
        problems: list[Problem],
        encode: Callable[[Problem], tuple[int, ...]],
        decode: Callable[[Any], str],
        timer: StateTimer,
    ) -> None:
        self._config, self._name = config, name
        self._client, self._engine, self._receiver, self._verifiers = client, engine, receiver, verifiers
        self._problems, self._encode, self._decode, self._timer = problems, encode, decode, timer
        self._generating: dict[int, Work] = {}
        self._scoring: dict[int, Work] = {}  # by verifier call
        self._newest: Manifest | None = None
        self._usable = False
        self._stop: Stop | None = None
        self._offered = 0
        self._calls = 0
        self._verifier_failures = 0
        self._refused = 0
        self._commit_failures = 0
        self._wanted = math.ceil(config.actors.slots / config.sampling.group_size) + 1
        self.counts = {"generated_tokens": 0, "groups": 0, "verifier_failures": 0, "weights_refused": 0}
        self._last_token = time.monotonic()

    # -- what the heartbeat says; read from the client's thread

    def in_flight(self) -> list[list[float]]:
        """``[ordinal, attempt, age in seconds]`` of every ticket held."""
        now = time.monotonic()
        works = [*self._generating.values(), *self._scoring.values()]
        return [[w.ticket.ordinal, w.ticket.attempt, round(now - w.since, 3)] for w in works]

    def info(self) -> dict[str, Any]:
        """Counters, and how long ago the engine produced a token."""
        return {
            **self.counts,
            "version": self._engine.version,
            "running": self._engine.num_running,
            "last_token_s": round(time.monotonic() - self._last_token, 3),
        }

    # -- the loop

    def run(self, first: Manifest | None) -> Stop:
        """Roll out until the server stops us.

        Args:
            first: newest version at the handshake; None: it is announced later.

        Raises:
            DeadlineError: the server has gone silent.
            WeightsError: the engine cannot hold what is published.
        """
        if first is not None:
            self._announce(first)
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._client.fileno(), self._receiver.fileno(), self._engine.fileno()):
                if descriptor is not None:
                    selector.register(descriptor, selectors.EVENT_READ)
            while self._stop is None:
                self._handle(self._client.receive(0.0))
                self._commit()
                self._generate()
                self._score()
                self._offer()
                if self._idle():
                    self._wait(selector)
        return self._stop

    def _handle(self, messages: list[tuple[Header, list[Any]]]) -> None:
        for header, _ in messages:
            kind = header["type"]
            if kind == "tickets":
                self._accept([Ticket.from_wire(t) for t in header["tickets"]])
            elif kind == "version":
                self._announce(Manifest.from_wire(header["manifest"]))
            elif kind == "cancel":
                self._cancel([(int(o), int(a)) for o, a in header["tickets"]])
            elif kind == "stop":
                self._stop = Stop(str(header["reason"]), bool(header["error"]))

    def _accept(self, tickets: list[Ticket]) -> None:
        self._offered = max(0, self._offered - len(tickets))
        sampling, requests = self._config.sampling, []
        for ticket in tickets:
            problem = self._problems[ticket.task_index]
            prompt = self._encode(problem)
            old = self._generating.get(ticket.ordinal)
            if old is not None:  # a fresh attempt at what we still decode replaces it
                self._engine.abort([ticket.ordinal])
            self._generating[ticket.ordinal] = Work(ticket, problem, prompt, time.monotonic())
            requests.append(
                Request(
                    id=ticket.ordinal,
                    prompt=prompt,
                    num_samples=ticket.group_size,
                    seed=(self._config.seed, ticket.ordinal, ticket.attempt),
                    max_new_tokens=sampling.max_new_tokens,
                    temperature=sampling.temperature,
                )
            )
        for request in requests:
            try:
                self._engine.submit([request])
                self._refused = 0
            except ValueError as error:  # the problem does not fit the model: no attempt can ever succeed
                self._fail(self._generating.pop(request.id).ticket, "prompt_refused", str(error))
                self._refused += 1
                if self._refused == MAX_REFUSED:
                    self._client.send("fatal", reason=f"{MAX_REFUSED} prompts in a row were refused; the last: {error}")

    def _cancel(self, tickets: list[tuple[int, int]]) -> None:
        for ordinal, attempt in tickets:
            work = self._generating.get(ordinal)
            if work is not None and work.ticket.attempt == attempt:
                self._engine.abort([ordinal])
                del self._generating[ordinal]

    def _announce(self, manifest: Manifest) -> None:
        self._newest = manifest
        self._receiver.fetch(manifest)

    def _commit(self) -> None:
        """Swap in the prepared version. Until the engine's read-back is proven, nothing is decoded."""
        prepared = self._receiver.ready()
        if prepared is None:
            return
        began = time.monotonic()
        with self._timer.during("committing"):
            self._usable = False
            try:
                checksum = self._engine.load_weights(prepared.manifest, prepared.data)
            except WeightsError as error:
                self._refuse(prepared, error)
                return
        self._usable = True
        self._commit_failures = 0
        self._client.send(
            "live",
            version=prepared.manifest.version,
            checksum=checksum,
            transfer_s=prepared.transfer_s,
            commit_s=time.monotonic() - began,
        )

    def _refuse(self, prepared: Prepared, error: WeightsError) -> None:
        """The engine does not hold what was published (a slot overwritten meanwhile, or a fault): fetch the newest."""
        self.counts["weights_refused"] += 1
        self._commit_failures += _is_intact(prepared)  # a learner that is faster than our copies is no fault
        print(f"{self._name}: {error}", flush=True)
        if self._commit_failures >= MAX_COMMIT_FAILURES:
            raise WeightsError(f"{self._commit_failures} versions in a row could not be committed; the last: {error}")
        if self._newest is not None:
            self._receiver.fetch(self._newest)

    def _generate(self) -> None:
        """One decode step; an engine that works elsewhere is asked though it is idle: it may have failed."""
        decodes = self._usable and self._engine.num_running > 0
        if not decodes and self._engine.fileno() is None:
            return
        if decodes:
            self._timer.enter("generating")
        completions = self._engine.step(0.0)
        for completion in completions:
            self._last_token = time.monotonic()
            self.counts["generated_tokens"] += len(completion.tokens)
            work = self._generating.get(completion.request_id)
            if work is None:
                continue
            work.completions.append(completion)
            if len(work.completions) == work.ticket.group_size:
                del self._generating[completion.request_id]
                self._verify(work)

    def _verify(self, work: Work) -> None:
        work.completions.sort(key=lambda c: c.sample)
        size = work.ticket.group_size
        columns = {k: [v] * size for k, v in work.problem.columns.items()}
        columns["completion_ids"] = [c.tokens.tolist() for c in work.completions]
        columns["finish_reasons"] = [c.finish_reason for c in work.completions]
        self._calls += 1  # not the ordinal: an old attempt at it may still be with the verifiers
        self._scoring[self._calls] = work
        texts = [self._decode(c.tokens) for c in work.completions]
        self._verifiers.submit(self._calls, [work.problem.prompt] * size, texts, columns)

    def _score(self) -> None:
        groups = []
        for verdict in self._verifiers.poll():
            work = self._scoring.pop(verdict.key)
            outcome, detail = _judge(verdict)
            if outcome != "ok":
                self._fail(work.ticket, f"verifier_{outcome}", detail)
                self._count_verifier_failure(outcome, detail)
                continue
            self._verifier_failures = 0
            groups.append(self._group(work, verdict.rewards or []))
        if groups:
            self.counts["groups"] += len(groups)
            self._client.send_groups(groups)

    def _group(self, work: Work, rewards: list[float]) -> Any:
        ticket = work.ticket
        meta: dict[str, Any] = {"actor": self._name, "seconds": round(time.monotonic() - work.since, 4)}
        if ticket.ordinal % self._config.buffer.groups_per_step == 0:  # one text a step, for the report
            most = SAMPLE_CHARACTERS // ticket.group_size
            meta["prompt"] = work.problem.prompt[:SAMPLE_CHARACTERS]
            meta["completions"] = [self._decode(c.tokens)[:most] for c in work.completions]
        return make_group(
            ordinal=ticket.ordinal,
            attempt=ticket.attempt,
            task_index=ticket.task_index,
            trajectories=[
                token_trajectory(
                    prompt=work.prompt, completion=c.tokens, logprobs=c.logprobs, versions=c.versions, reward=r
                )
                for c, r in zip(work.completions, rewards, strict=True)
            ],
            meta=meta,
        )

    def _fail(self, ticket: Ticket, reason: str, detail: str) -> None:
        self._client.send(
            "fail", ordinal=ticket.ordinal, attempt=ticket.attempt, reason=reason, detail=detail[-2000:], final=True
        )

    def _count_verifier_failure(self, outcome: str, detail: str) -> None:
        self.counts["verifier_failures"] += 1
        self._verifier_failures += 1
        if self._verifier_failures == MAX_VERIFIER_FAILURES:
            self._client.send(
                "fatal",
                reason=f"the verifier failed {MAX_VERIFIER_FAILURES} times in a row ({outcome}); the last: {detail}",
            )

    def _offer(self) -> None:
        """Tell the server how many tickets we could take now; only when that number has grown."""
        if self._engine.version < 0:
            return
        count = max(0, self._wanted - len(self._generating))
        if count > self._offered:
            self._offered = count
            self._client.send("credit", count=count)

    def _idle(self) -> bool:
        working_here = self._engine.fileno() is None and self._engine.num_running > 0
        return self._stop is None and not (self._usable and working_here)

    def _wait(self, selector: selectors.BaseSelector) -> None:
        """Sleep until something happens or a verifier call passes its limit, at most one heartbeat."""
        if self._engine.num_running and self._usable:
            self._timer.enter("generating")
        elif self._scoring:
            self._timer.enter("scoring")
        elif not self._usable or (self._newest and self._newest.version > self._engine.version):
            self._timer.enter("waiting_weights")
        else:
            self._timer.enter("waiting_ticket")
        pipes = [selector.register(d, selectors.EVENT_READ) for d in self._verifiers.filenos()]
        due = self._verifiers.next_deadline
        patience = self._config.buffer.heartbeat_s
        selector.select(patience if due is None else min(patience, max(0.0, due - time.monotonic())))
        for key in pipes:
            selector.unregister(key.fileobj)


def _is_intact(prepared: Prepared) -> bool:
    """Whether the prepared bytes are still those that were published."""
    try:
        prepared.manifest.verify(prepared.data)
    except WeightsError:
        return False
    return True


def _judge(verdict: Verdict) -> tuple[str, str]:
    """Outcome of a verdict, with a reward that is not finite as an outcome of its own."""
    if verdict.outcome == "ok" and not all(math.isfinite(r) for r in verdict.rewards or []):
        return "bad_reward", f"rewards {verdict.rewards} are not all finite"
    return verdict.outcome, verdict.detail
