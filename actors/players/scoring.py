"""Between finished answers and their rewards: calls of a verifier pool under keys of our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from actors.players.work import Failed, Job
from actors.verifiers.pool import VerifierPool

if TYPE_CHECKING:
    from actors.rewards.pool import RewardPool


class Scoring:
    """Scores jobs.

    Args:
        pool: of verifiers, or of several sources.
    """

    def __init__(self, pool: VerifierPool | RewardPool) -> None:
        self.pool = pool
        self._jobs: dict[int, Job] = {}
        self._calls = 0

    @property
    def busy(self) -> bool:
        """Whether verdicts are awaited."""
        return bool(self._jobs)

    def submit(self, job: Job, texts: Sequence[str]) -> None:
        """Queue the call for all samples of a job, ``texts`` as their completions.

        Columns: those of the problem, ``completion_ids`` (what was sampled) and ``finish_reasons`` (of the last turn).
        """
        columns = {k: [v] * job.size for k, v in job.problem.columns.items()}
        columns["completion_ids"] = [[i for turn in t.turns for i in turn.tokens.tolist()] for t in job.transcripts]
        columns["finish_reasons"] = [t.turns[-1].finish_reason for t in job.transcripts]
        self._calls += 1  # not the job's id: an old attempt at it may still be with the verifiers
        self._jobs[self._calls] = job
        self.pool.submit(self._calls, [job.problem.prompt] * job.size, list(texts), columns)

    def poll(self) -> list[tuple[Job, list[float]] | Failed]:
        """Rewards [size] that are there by now, and what cannot be scored."""
        found: list[tuple[Job, list[float]] | Failed] = []
        for verdict in self.pool.poll():
            job = self._jobs.pop(verdict.key)
            fault = verdict.fault
            if fault is None:
                found.append((job, verdict.rewards or []))
            else:
                found.append(Failed(job, "verifier", *fault, final=True))
        return found
