"""From a configuration to the player of an actor or of the evaluator: single-turn answers, or episodes.

| task.environment | reward.placement | player                                                               |
|------------------|------------------|----------------------------------------------------------------------|
| empty            | ``actor``        | ``Answers`` with the reward sources                                  |
| empty            | ``scorer``       | ``Answers`` without: rewards are NaN, a scorer gives them            |
| given            | ``actor``        | ``Episodes``: the environment's reward, plus model and judge if set  |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from actors.engines.base import Engine
from actors.environments.pool import EnvironmentPool
from actors.players.answers import Answers
from actors.players.episodes import Episodes
from actors.players.requests import Requests
from actors.players.scoring import Scoring
from actors.players.work import Player
from actors.rewards.pool import make_reward_pool
from async_rl.config import Config
from async_rl.models import context_length, load_tokenizer, stop_token_ids
from async_rl.sandbox import Sandbox
from async_rl.tasks.prompt import decode_completion, encode_prompt
from async_rl.tasks.turns import observation_encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all players of a run share."""

    config: Config
    folder: Path
    """Of the model."""
    verifier: str
    """``module:function`` of the task's data."""
    search: Path
    """Folder that comes first in the search for the user's modules."""


def make_player(setting: Setting, engine: Engine) -> Player:
    """The player of one actor.

    Raises:
        ConfigError: a reward source or the environment cannot start, or the chat template does not fit several turns.
    """
    config = setting.config
    if config.task.environment:
        return make_episodes(setting, engine, config.sampling.temperature)
    scoring = None
    if config.reward.placement == "actor":
        scoring = Scoring(make_reward_pool(config, setting.verifier, setting.search))
    tokenizer, stops = load_tokenizer(setting.folder), stop_token_ids(setting.folder)
    return Answers(
        Requests(engine, config.sampling.max_new_tokens, config.sampling.temperature),
        scoring,
        encode=lambda problem: encode_prompt(tokenizer, problem, config.task),
        decode=partial(decode_completion, tokenizer, stop_ids=stops),
    )


def make_episodes(setting: Setting, engine: Engine, temperature: float) -> Episodes:
    """Episodes at a temperature; 0 is greedy.

    Raises:
        ConfigError: as :func:`make_player`.
    """
    config, task = setting.config, setting.config.task
    tokenizer, stops = load_tokenizer(setting.folder), stop_token_ids(setting.folder)
    observe = observation_encoder(tokenizer, stops, chat=task.chat)
    pool = EnvironmentPool(task.environment, task.timeout_s, task.verifiers, setting.search, Sandbox.of(task))
    try:
        scoring = _further_sources(setting)
    except BaseException:
        pool.close()
        raise
    return Episodes(
        Requests(engine, config.sampling.max_new_tokens, temperature),
        pool,
        encode=lambda problem: encode_prompt(tokenizer, problem, task),
        observe=observe,
        decode=partial(decode_completion, tokenizer, stop_ids=stops),
        max_turns=task.max_turns,
        context=context_length(setting.folder),
        weight=config.reward.verifier,
        scoring=scoring,
    )


def _further_sources(setting: Setting) -> Scoring | None:
    """Reward model and judge, without the verifier, whose place the environment has."""
    reward = setting.config.reward.model_copy(update={"verifier": 0.0})
    if reward.model == reward.judge == 0:
        return None
    config = setting.config.model_copy(update={"reward": reward})
    return Scoring(make_reward_pool(config, setting.verifier, setting.search))
