"""Multi-turn: every sample of a job is an episode between the engine and an environment. Tokens in, tokens out.

    problem ─► reset × size ─► first observation ─► one request, all samples ─► completions
                                                                                    │ text
           next request, one per episode ◄── transcript + observation ids ◄── act ◄─┘
                                                                               └─ done ─► return ─► Played

An episode ends when the environment says so (``done``), after ``max_turns`` answers (``turns``), when an answer was cut
at its length, because such an answer is none (``cut``), or when the context has no room for another one (``context``).

What an environment does wrong ends the job: ``error`` and ``bad_result`` for good, ``lost`` for another attempt, and so
do ``timeout`` and ``died`` until the third attempt, because one of several episodes is to blame and nobody knows which.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from actors.engines.base import Completion
from actors.environments.pool import EnvironmentPool, Reply
from actors.players.requests import Requests
from actors.players.scoring import Scoring
from actors.players.transcript import Transcript
from actors.players.work import Failed, Job, Played, Result, Source
from async_rl.tasks import Problem

MAX_ATTEMPTS = 3
"""A job whose environment blocked or ended its process this often is given up."""


class Episodes:
    """Implements :class:`actors.players.work.Player`.

    Args:
        requests: to the engine.
        pool: of environments.
        encode: problem, with the first observation as its prompt, to prompt ids.
        observe: later observation to token ids, template included.
        decode: completion ids to the text that the environment gets.
        max_turns: most answers of an episode.
        context: most tokens that the model reads.
        weight: of the environment's reward.
        scoring: further reward sources, which are added.
    """

    def __init__(
        self,
        requests: Requests,
        pool: EnvironmentPool,
        *,
        encode: Callable[[Problem], tuple[int, ...]],
        observe: Callable[[str], tuple[int, ...]],
        decode: Callable[[Any], str],
        max_turns: int,
        context: int,
        weight: float = 1.0,
        scoring: Scoring | None = None,
    ) -> None:
        self.refused = 0
        self._requests, self._pool, self._scoring = requests, pool, scoring
        self._encode, self._observe, self._decode = encode, observe, decode
        self._max_turns, self._context, self._weight = max_turns, context, weight
        self._owners: dict[int, tuple[Job, int]] = {}
        """Job and sample of each episode."""
        self._episodes: dict[Job, list[int]] = {}
        """Episode of each sample of a job that is being generated."""
        self._prompts: dict[Job, dict[int, str]] = {}
        """First observations of a job whose episodes are being reset, by sample."""
        self._running: dict[Job, int] = {}
        """Samples of a job that have not ended."""
        self._results: list[Result] = []

    @property
    def unfinished(self) -> int:
        """Episodes that have not ended."""
        return len(self._owners)

    @property
    def busy(self) -> bool:
        """Whether an environment or a verifier works."""
        return self._pool.pending > 0 or (self._scoring is not None and self._scoring.busy)

    def begin(self, job: Job) -> None:
        """Reset an environment for each sample, all to the same state."""
        columns = {**job.problem.columns, "prompt": job.problem.prompt}
        seed = int(np.random.SeedSequence(job.seed[:2]).generate_state(1)[0])
        self._episodes[job] = [self._pool.open(columns, seed) for _ in range(job.size)]
        self._owners.update({episode: (job, i) for i, episode in enumerate(self._episodes[job])})
        self._prompts[job] = {}

    def take(self, completions: Sequence[Completion]) -> None:
        """Hand each answer to its environment."""
        for completion in completions:
            if (owner := self._requests.owner(completion)) is None:
                continue
            job, sample = owner
            transcript = job.transcripts[sample]
            transcript.turns.append(completion)
            transcript.texts.append(text := self._decode(completion.tokens))
            if completion.finish_reason == "length":
                self._end(job, sample, "cut")
            else:
                self._pool.act(self._episodes[job][sample], text)

    def poll(self) -> list[Result]:
        """Go on with what the environments have answered; results that are there by now."""
        for reply in self._pool.poll():
            if reply.episode in self._owners:  # else it fell with its job a moment ago
                self._go_on(*self._owners[reply.episode], reply)
        for scored in self._scoring.poll() if self._scoring is not None else []:
            self._results.append(scored if isinstance(scored, Failed) else self._played(*scored))
        results, self._results = self._results, []
        return results

    def wait(self, timeout_s: float) -> None:
        """Until :meth:`poll` has something to do, at most ``timeout_s``."""
        due = self.next_deadline
        poller = select.poll()
        for descriptor in self.filenos():
            poller.register(descriptor, select.POLLIN)
        left_s = timeout_s if due is None else min(timeout_s, due - time.monotonic())
        poller.poll(max(0.0, left_s) * 1_000)

    def drop(self, job: Job) -> None:
        """Forget a job that is being generated, and end its episodes."""
        self._requests.abort(job)
        for episode in self._episodes.pop(job):
            if self._owners.pop(episode, None) is not None:
                self._pool.drop(episode)
        self._prompts.pop(job, None)
        self._running.pop(job, None)

    def filenos(self) -> list[int]:
        """Descriptors of the environments and of the verifiers."""
        return self._pool.filenos() + (self._scoring.pool.filenos() if self._scoring is not None else [])

    @property
    def next_deadline(self) -> float | None:
        """The earlier one of the environments' and the verifiers'."""
        both = [self._pool.next_deadline, self._scoring.pool.next_deadline if self._scoring is not None else None]
        return min((due for due in both if due is not None), default=None)

    def close(self) -> None:
        """End all child processes."""
        self._pool.close()
        if self._scoring is not None:
            self._scoring.pool.close()

    def _go_on(self, job: Job, sample: int, reply: Reply) -> None:
        if reply.turn is None:
            final = reply.outcome in ("error", "bad_result")
            final = final or (reply.outcome != "lost" and job.draw >= MAX_ATTEMPTS - 1)
            self._fail(job, "environment", reply.outcome, reply.detail, final=final)
        elif job in self._prompts:
            self._prompts[job][sample] = reply.turn.observation
            if len(self._prompts[job]) == job.size:
                self._ask_first(job)
        else:
            transcript = job.transcripts[sample]
            transcript.reward += reply.turn.reward
            if reply.turn.done:
                self._end(job, sample, "done")
            elif len(transcript.turns) == self._max_turns:
                self._end(job, sample, "turns")
            else:
                self._ask_later(job, sample, reply.turn.observation)

    def _ask_first(self, job: Job) -> None:
        prompts = self._prompts.pop(job)
        job.prompt = prompts[0]
        if len(different := sorted(set(prompts.values()))) > 1:
            one, other = (text[:200] for text in different[:2])
            detail = f"reset with equal arguments gave {one!r} and {other!r}: a group has one start"
            self._fail(job, "environment", "bad_result", detail, final=True)
            return
        try:
            prompt = self._encode(replace(job.problem, prompt=job.prompt))
            self._requests.first(job, prompt)
        except ValueError as error:  # the observation does not fit the model: no attempt can ever succeed
            self.refused += 1
            self._fail(job, "prompt", "refused", str(error), final=True)
            return
        self.refused = 0
        job.transcripts = [Transcript(prompt) for _ in range(job.size)]
        self._running[job] = job.size

    def _ask_later(self, job: Job, sample: int, observation: str) -> None:
        transcript, ids = job.transcripts[sample], self._observe(observation)
        tokens = transcript.tokens + ids
        if len(tokens) + self._requests.max_new_tokens > self._context:
            self._end(job, sample, "context")
            return
        try:
            self._requests.later(job, sample, tokens, len(transcript.turns))
        except ValueError as error:  # a token that the model does not know
            self._fail(job, "prompt", "refused", str(error), final=True)
            return
        transcript.observations.append(ids)
        transcript.texts.append(observation)

    def _end(self, job: Job, sample: int, why: str) -> None:
        job.transcripts[sample].end = why
        episode = self._episodes[job][sample]
        del self._owners[episode]
        self._pool.drop(episode)
        self._running[job] -= 1
        if not self._running[job]:
            del self._running[job], self._episodes[job]
            job.generated = True
            if self._scoring is None:
                self._results.append(self._played(job, [0.0] * job.size))
            else:
                self._scoring.submit(job, ["\n".join(t.texts) for t in job.transcripts])

    def _played(self, job: Job, extra: Sequence[float]) -> Played:
        rewards = [self._weight * t.reward + e for t, e in zip(job.transcripts, extra, strict=True)]
        return Played(job, rewards)

    def _fail(self, job: Job, source: Source, outcome: str, detail: str, *, final: bool) -> None:
        self.drop(job)
        self._results.append(Failed(job, source, outcome, detail, final=final))
