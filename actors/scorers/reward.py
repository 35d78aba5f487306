"""The stage ``reward``: groups back to texts, texts to the reward sources, verdicts to rewards.

tokens, loss_mask, task_index, finish reasons ─► prompts, completions, columns ─► RewardPool ─► rewards [G]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from actors.rewards.pool import RewardPool
from actors.scorers.stage import Failure
from actors.verifiers.pool import VerifierPool
from async_rl.data import Annotation, Group
from async_rl.tasks import Problem


class RewardStage:
    """Annotates groups with ``rewards``.

    Args:
        pool: the reward sources.
        workers: calls that the pool serves at the same time.
        problems: training problems, by task index.
        decode: completion ids to the text that is scored.
    """

    busy = False

    def __init__(
        self,
        pool: VerifierPool | RewardPool,
        workers: int,
        problems: Sequence[Problem],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._pool, self._problems, self._decode = pool, problems, decode
        self.wanted = workers + 1
        """One group per worker, and a next one."""
        self._calls = 0
        self._scoring: dict[int, Group] = {}  # by call: a group whose lease ran out may come a second time
        self._refused: list[Annotation | Failure] = []

    def submit(self, group: Group) -> None:
        """Take a leased group and ask the sources."""
        reasons = group.meta.get("finish_reasons")
        if not isinstance(reasons, list) or len(reasons) != len(group.lengths):
            why = f"the group of actor {group.meta.get('actor')!r} has no finish_reasons for its completions"
            self._refused.append(Failure(group=group, reason="no_finish_reasons", detail=why))
            return
        self._calls += 1
        self._scoring[self._calls] = group
        self._pool.submit(self._calls, *call_of(group, self._problems[group.task_index], reasons, self._decode))

    def step(self) -> list[Annotation | Failure]:
        """What the sources have answered by now."""
        results, self._refused = self._refused, []
        for verdict in self._pool.poll():
            group, fault = self._scoring.pop(verdict.key), verdict.fault
            if fault is not None:
                results.append(Failure(group=group, reason=f"verifier_{fault[0]}", detail=fault[1]))
            else:
                rewards = np.asarray(verdict.rewards, np.float32)
                results.append(Annotation(ordinal=group.ordinal, attempt=group.attempt, stage="reward", values=rewards))
        return results

    def filenos(self) -> list[int]:
        """Of the sources' child processes."""
        return self._pool.filenos()

    @property
    def next_deadline(self) -> float | None:
        """When a call passes its limit."""
        return self._pool.next_deadline

    def close(self) -> None:
        """End the child processes."""
        self._pool.close()


def call_of(
    group: Group, problem: Problem, finish_reasons: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> tuple[list[str], list[str], dict[str, list[Any]]]:
    """Prompts, completions and columns, as an actor that scores its own groups would give them."""
    size = len(group.lengths)
    ids = [t.tokens[t.loss_mask == 1].tolist() for t in group.trajectories]
    columns: dict[str, list[Any]] = {name: [value] * size for name, value in problem.columns.items()}
    columns |= {"completion_ids": ids, "finish_reasons": list(finish_reasons)}
    return [problem.prompt] * size, [decode(row) for row in ids], columns
