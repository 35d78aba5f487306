"""Tries ``task.environment`` before a run starts: ``python -m actors.environments.check CONFIG.toml``.

    problem ─► reset, twice ─► equal first observations ─► prompt ids that fit the model ─► ok

What is wrong is one sentence on stderr and exit code 1; nothing is sampled.
"""

from __future__ import annotations

import argparse
import time

from actors.environments.pool import EnvironmentPool, Reply
from async_rl.config import Config, load_config
from async_rl.errors import ConfigError
from async_rl.models import context_length, load_tokenizer, resolve_model, stop_token_ids
from async_rl.process import run_guarded
from async_rl.sandbox import Sandbox
from async_rl.tasks import Problem, load_task
from async_rl.tasks.prompt import encode_prompt
from async_rl.tasks.turns import observation_encoder

_PATIENCE_S = 5.0
"""Beyond the limit of a call, by which the pool itself gives an answer."""


def check(config: Config) -> str:
    """Begin an episode of the first problem; how long its prompt is.

    Raises:
        ConfigError: the environment, the chat template or the length of the prompt is wrong; says what.
    """
    task, folder = config.task, resolve_model(config.model.path)
    tokenizer = load_tokenizer(folder)
    observation_encoder(tokenizer, stop_token_ids(folder), chat=task.chat)
    problem = load_task(task, config.seed).train[0]
    problem = Problem(first_observation(config, problem), problem.columns, problem.before)
    try:
        prompt = encode_prompt(tokenizer, problem, task)
    except ValueError as error:
        raise ConfigError(f"task.environment = {task.environment!r}, first observation: {error}") from None
    context, new = context_length(folder), config.sampling.max_new_tokens
    if len(prompt) + new > context:
        raise ConfigError(
            f"task.environment = {task.environment!r}: its first observation makes a prompt of {len(prompt)} tokens, "
            f"which with sampling.max_new_tokens = {new} passes the model's context of {context}; lower it, or make "
            "observations shorter"
        )
    return f"an episode begins with {len(prompt)} tokens"


def first_observation(config: Config, problem: Problem) -> str:
    """What two resets with equal arguments say.

    Raises:
        ConfigError: the environment cannot be imported, a reset fails, or the two are not alike.
    """
    task = config.task
    pool = EnvironmentPool(task.environment, task.timeout_s, 1, sandbox=Sandbox.of(task))
    try:
        columns = {**problem.columns, "prompt": problem.prompt}
        for _ in range(2):
            pool.open(columns, config.seed)
        replies: list[Reply] = []
        deadline = time.monotonic() + task.timeout_s + _PATIENCE_S
        while len(replies) < 2 and time.monotonic() < deadline:
            replies += pool.wait(deadline - time.monotonic())
    finally:
        pool.close()
    where = f"task.environment = {task.environment!r}: reset of the problem {problem.prompt[:60]!r}"
    texts = []
    for reply in replies:
        if reply.turn is None:
            print(reply.detail, flush=True)
            raise ConfigError(f"{where} failed ({reply.outcome}): {reply.detail.splitlines()[-1]}")
        texts.append(reply.turn.observation)
    if len(texts) < 2:
        raise ConfigError(f"{where} gave no answer")
    if texts[0] != texts[1]:
        raise ConfigError(
            f"{where} with equal arguments gave {texts[0][:80]!r} and {texts[1][:80]!r}; a group has one start, so "
            "what is random must come from the seed"
        )
    return texts[0]


def main() -> None:
    """Check and say so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    print(check(load_config(parser.parse_args().config)), flush=True)


if __name__ == "__main__":
    run_guarded(main)
