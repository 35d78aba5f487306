"""Which job and sample each request at the engine belongs to.

    job ──first: one request, all samples──► engine ──completion──► owner: (job, sample)
        ──later: one request per episode───►

Each request has a random stream of its own: (run seed, ordinal, draw), then also (sample, turn).
"""

from __future__ import annotations

from actors.engines.base import Completion, Engine, Request
from actors.players.work import Job

_LATER_IDS = 1 << 48
"""Requests after the first turn count from here; the first has the id of its job, which is below."""


class Requests:
    """Submits to an engine and keeps the books of what is in flight.

    Args:
        engine: that samples.
        max_new_tokens: longest answer of one turn.
        temperature: of sampling; 0 is greedy.
    """

    def __init__(self, engine: Engine, max_new_tokens: int, temperature: float) -> None:
        self.max_new_tokens = max_new_tokens
        self._engine, self._temperature = engine, temperature
        self._owners: dict[int, tuple[Job, int]] = {}
        """Job and first sample of each request."""
        self._missing: dict[int, int] = {}
        """Completions that a request still owes."""
        self._next = _LATER_IDS

    def first(self, job: Job, prompt: tuple[int, ...]) -> None:
        """Ask for the first turn of all samples.

        Raises:
            ValueError: the prompt does not fit the model.
        """
        self._submit(job.id, job, 0, prompt, job.size, job.seed)

    def later(self, job: Job, sample: int, prompt: tuple[int, ...], turn: int) -> None:
        """Ask for a later turn (from 1) of one sample.

        Raises:
            ValueError: the transcript does not fit the model.
        """
        self._next += 1
        self._submit(self._next, job, sample, prompt, 1, (*job.seed, sample, turn))

    def owner(self, completion: Completion) -> tuple[Job, int] | None:
        """Job and sample of a completion; None when its job was dropped."""
        key = completion.request_id
        if key not in self._owners:
            return None
        job, first = self._owners[key]
        self._missing[key] -= 1
        if not self._missing[key]:
            del self._owners[key], self._missing[key]
        return job, first + completion.sample

    def abort(self, job: Job) -> None:
        """Drop what the engine still does for a job."""
        ids = [key for key, (owner, _) in self._owners.items() if owner is job]
        self._engine.abort(ids)
        for key in ids:
            del self._owners[key], self._missing[key]

    def _submit(
        self, key: int, job: Job, sample: int, prompt: tuple[int, ...], count: int, seed: tuple[int, ...]
    ) -> None:
        request = Request(
            id=key,
            prompt=prompt,
            num_samples=count,
            seed=seed,
            max_new_tokens=self.max_new_tokens,
            temperature=self._temperature,
        )
        self._engine.submit([request])
        self._owners[key], self._missing[key] = (job, sample), count
