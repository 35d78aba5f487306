"""Answering held-out problems greedily and scoring the answers; used by the evaluator and the synchronous script.

    problems ─► answer ─► rewards_of          single-turn
             └► play                          multi-turn: the same episodes as in training

Nothing is random: temperature 0, and the same seeds for environments each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from actors.engines.base import Completion, Engine, Request
from actors.players.episodes import Episodes
from actors.players.work import Job, Played
from actors.rewards.pool import RewardPool
from actors.verifiers.pool import VerifierPool
from async_rl.tasks import Problem

_CALL = 32
"""Answers per verifier call."""
_LOOK_S = 0.2
"""A wait looks so often whether its caller has something else to do."""


def answer(
    engine: Engine, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, between: Callable[[], None]
) -> list[Completion]:
    """Greedy completions of all prompts, in order; ``between`` is called between two decode steps."""
    engine.submit(
        [
            Request(id=i, prompt=p, num_samples=1, seed=(0, i), max_new_tokens=max_new_tokens, temperature=0.0)
            for i, p in enumerate(prompts)
        ]
    )
    done: dict[int, Completion] = {}
    while len(done) < len(prompts):
        between()
        done.update({c.request_id: c for c in engine.step(1.0)})
    return [done[i] for i in range(len(prompts))]


def rewards_of(
    pool: VerifierPool | RewardPool,
    problems: Sequence[Problem],
    completions: Sequence[Completion],
    decode: Callable[[Any], str],
    between: Callable[[], None],
) -> tuple[list[float], int]:
    """Reward of each answer, and how many could not be scored (they count as 0)."""
    rewards, failures = [0.0] * len(problems), 0
    starts = range(0, len(problems), _CALL)
    for start in starts:
        block, answers = problems[start : start + _CALL], completions[start : start + _CALL]
        columns: dict[str, list[Any]] = {k: [p.columns[k] for p in block] for k in block[0].columns}
        columns["completion_ids"] = [c.tokens.tolist() for c in answers]
        columns["finish_reasons"] = [c.finish_reason for c in answers]
        pool.submit(start, [p.prompt for p in block], [decode(c.tokens) for c in answers], columns)
    waiting = set(starts)
    while waiting:
        between()
        for verdict in pool.wait(_LOOK_S):
            waiting.discard(verdict.key)
            scored = verdict.rewards if verdict.outcome == "ok" else None
            size = min(_CALL, len(problems) - verdict.key)
            for i in range(size):
                reward = scored[i] if scored is not None else math.nan
                failures += not math.isfinite(reward)
                rewards[verdict.key + i] = reward if math.isfinite(reward) else 0.0
    return rewards, failures


def play(
    episodes: Episodes, engine: Engine, problems: Sequence[Problem], between: Callable[[], None]
) -> list[Played | None]:
    """One episode of each problem, in order; None where it could not be played. The episodes are always the same ones.

    ``between`` is called between two decode steps.
    """
    jobs = [Job(id=i, problem=problem, size=1, seed=(0, i)) for i, problem in enumerate(problems)]
    for job in jobs:
        episodes.begin(job)
    found: dict[int, Played | None] = {}
    while len(found) < len(jobs):
        between()
        for result in episodes.poll():
            found[result.job.id] = result if isinstance(result, Played) else None
        if engine.num_running:
            episodes.take(engine.step(_LOOK_S))
        else:
            episodes.wait(_LOOK_S)
    return [found[job.id] for job in jobs]
