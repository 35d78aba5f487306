"""Single-turn: one answer to each prompt, scored by a verifier here or left to scorer processes.

    problem ─encode─► engine ─► completions ─decode─► verifiers ─► rewards ─► Played
                                            └─ no verifiers: rewards NaN ──► Played

A prompt that does not fit the model is given up for good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from actors.engines.base import Completion
from actors.players.requests import Requests
from actors.players.scoring import Scoring
from actors.players.transcript import Transcript
from actors.players.work import Failed, Job, Played, Result
from async_rl.tasks import Problem


class Answers:
    """Implements :class:`actors.players.work.Player`.

    Args:
        requests: to the engine.
        scoring: None: rewards are NaN.
        encode: problem to prompt ids.
        decode: completion ids to the text that is verified.
    """

    def __init__(
        self,
        requests: Requests,
        scoring: Scoring | None,
        encode: Callable[[Problem], tuple[int, ...]],
        decode: Callable[[Any], str],
    ) -> None:
        self.refused = 0
        self._requests, self._scoring, self._encode, self._decode = requests, scoring, encode, decode
        self._missing: dict[Job, int] = {}
        self._results: list[Result] = []

    @property
    def unfinished(self) -> int:
        """Samples that are not completed."""
        return sum(self._missing.values())

    @property
    def busy(self) -> bool:
        """Whether verdicts are awaited."""
        return self._scoring is not None and self._scoring.busy

    def begin(self, job: Job) -> None:
        """Submit the prompt for all samples."""
        job.prompt = job.problem.prompt
        try:
            prompt = self._encode(job.problem)
            self._requests.first(job, prompt)
        except ValueError as error:  # the problem does not fit the model: no attempt can ever succeed
            self.refused += 1
            self._results.append(Failed(job, "prompt", "refused", str(error), final=True))
            return
        self.refused = 0
        job.transcripts = [Transcript(prompt) for _ in range(job.size)]
        self._missing[job] = job.size

    def take(self, completions: Sequence[Completion]) -> None:
        """Keep each answer; the last one of a job sends it to be scored."""
        for completion in completions:
            if (owner := self._requests.owner(completion)) is None:
                continue
            job, sample = owner
            transcript = job.transcripts[sample]
            transcript.turns.append(completion)
            transcript.texts.append(self._decode(completion.tokens))
            self._missing[job] -= 1
            if not self._missing[job]:
                del self._missing[job]
                self._finish(job)

    def poll(self) -> list[Result]:
        """Verdicts that are there by now."""
        results, self._results = self._results, []
        for scored in self._scoring.poll() if self._scoring is not None else []:
            results.append(scored if isinstance(scored, Failed) else Played(*scored))
        return results

    def drop(self, job: Job) -> None:
        """Forget a job that is being decoded."""
        self._requests.abort(job)
        self._missing.pop(job, None)

    def filenos(self) -> list[int]:
        """Descriptors of the verifiers."""
        return self._scoring.pool.filenos() if self._scoring is not None else []

    @property
    def next_deadline(self) -> float | None:
        """Of the verifiers."""
        return self._scoring.pool.next_deadline if self._scoring is not None else None

    def close(self) -> None:
        """End the verifiers."""
        if self._scoring is not None:
            self._scoring.pool.close()

    def _finish(self, job: Job) -> None:
        job.generated = True
        if self._scoring is None:
            self._results.append(Played(job, [math.nan] * job.size))
        else:
            self._scoring.submit(job, [t.texts[0] for t in job.transcripts])
