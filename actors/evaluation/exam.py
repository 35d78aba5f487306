"""What the evaluator asks of each version: all held-out problems once, greedily, and what that gave.

    make_exam ─► WrittenExam (single-turn) │ PlayedExam (multi-turn) ── take ─► Marks

Both give the same episodes or prompts to every version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from actors.engines.base import Engine
from actors.evaluation.heldout import answer, play, rewards_of
from actors.players.episodes import Episodes
from actors.players.factory import Setting, make_episodes
from actors.rewards.pool import make_reward_pool
from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.models import context_length, load_tokenizer, stop_token_ids
from async_rl.tasks import Problem
from async_rl.tasks.prompt import decode_completion, encode_prompt

_SAMPLES = 8
"""Answers that are sent along as text."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What one version made of the problems."""

    rewards: Sequence[float]
    """One per problem; 0 where there is none."""
    metrics: dict[str, float]
    """``length`` (sampled tokens), ``skipped`` and ``unscored`` problems, ``turns`` of an episode."""
    samples: list[dict[str, Any]]
    """Some answers as text."""


class Exam(Protocol):
    """The same questions each time."""

    def take(self, between: Callable[[], None]) -> Marks:
        """Answer and score everything; ``between`` is called between two decode steps."""

    def close(self) -> None:
        """End all child processes."""


def judged_by_verifier(config: Config) -> Config:
    """The same configuration with the verifier (or the environment) as the only source, if it has a weight at all.

    Accuracy is the share of rewards of 1 or more, which means nothing for a weighted sum.
    """
    if config.reward.verifier == 0:
        return config
    reward = config.reward.model_copy(update={"verifier": 1.0, "model": 0.0, "judge": 0.0})
    return config.model_copy(update={"reward": reward})


def make_exam(setting: Setting, engine: Engine, problems: Sequence[Problem]) -> Exam:
    """The exam of a run.

    Raises:
        ConfigError: no problem fits the model, or what gives the rewards cannot start.
    """
    if setting.config.task.environment:
        return PlayedExam(make_episodes(setting, engine, temperature=0.0), engine, problems)
    return WrittenExam(setting, engine, problems)


class WrittenExam:
    """One answer to each problem; prompts that the model's context or chat template refuses are left out."""

    def __init__(self, setting: Setting, engine: Engine, problems: Sequence[Problem]) -> None:
        config = setting.config
        self._engine, self._max_new_tokens = engine, config.sampling.max_new_tokens
        self._tokenizer, self._stops = load_tokenizer(setting.folder), stop_token_ids(setting.folder)
        room = context_length(setting.folder) - self._max_new_tokens
        self._problems: list[Problem] = []
        self._prompts: list[tuple[int, ...]] = []
        refused = ""
        for problem in problems:
            try:
                prompt = encode_prompt(self._tokenizer, problem, config.task)
                if len(prompt) > room:
                    raise ValueError(f"{len(prompt)} tokens, and the model has room for {room}")
            except ValueError as error:
                refused = str(error)
                continue
            self._problems.append(problem)
            self._prompts.append(prompt)
        self._skipped = len(problems) - len(self._problems)
        if not self._problems:
            raise ConfigError(f"none of the {len(problems)} held-out prompts fits the model; the last: {refused}")
        if self._skipped:
            print(f"evaluator: {self._skipped} held-out prompts are left out; the last: {refused}", flush=True)
        self._pool = make_reward_pool(config, setting.verifier, setting.search)

    def take(self, between: Callable[[], None]) -> Marks:
        """Answer and score everything."""
        completions = answer(self._engine, self._prompts, self._max_new_tokens, between)
        rewards, failures = rewards_of(self._pool, self._problems, completions, self._decode, between)
        lengths = [len(c.tokens) for c in completions]
        samples = [
            {"prompt": p.prompt, "completion": self._decode(c.tokens), "reward": r}
            for p, c, r in list(zip(self._problems, completions, rewards, strict=True))[:_SAMPLES]
        ]
        metrics = {"length": float(np.mean(lengths)), "skipped": self._skipped, "unscored": failures}
        return Marks(rewards, metrics, samples)

    def close(self) -> None:
        """End the verifiers."""
        self._pool.close()

    def _decode(self, ids: Any) -> str:
        return decode_completion(self._tokenizer, ids, self._stops)


class PlayedExam:
    """One episode of each problem; what the environment fails to play counts as 0 and as unscored."""

    def __init__(self, episodes: Episodes, engine: Engine, problems: Sequence[Problem]) -> None:
        self._episodes, self._engine, self._problems = episodes, engine, problems

    def take(self, between: Callable[[], None]) -> Marks:
        """Play everything."""
        results = play(self._episodes, self._engine, self._problems, between)
        played = [r for r in results if r is not None]
        transcripts = [r.job.transcripts[0] for r in played]
        samples = [
            {"prompt": r.job.prompt, "completion": "\n".join(r.job.transcripts[0].texts), "reward": r.rewards[0]}
            for r in played[:_SAMPLES]
        ]
        metrics = {
            "length": float(np.sum([len(turn.tokens) for t in transcripts for turn in t.turns])) / max(len(played), 1),
            "turns": float(np.sum([len(t.turns) for t in transcripts])) / max(len(played), 1),
            "skipped": 0,
            "unscored": len(results) - len(played),
        }
        return Marks([0.0 if r is None else r.rewards[0] for r in results], metrics, samples)

    def close(self) -> None:
        """End the environments."""
        self._episodes.close()
