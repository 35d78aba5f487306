"""What a language model's run needs before its processes start, for the whole run or for one host, cheapest first.

config ─► engine, verifier, data, rewards ─► model, reference (built or fetched) ─► limits, environment ─► model folder
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

from async_rl.base_checksum import base_of
from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.launch import preflight, roles, task_checks
from async_rl.launch.overview import num_published
from async_rl.weights.trust import sending_host


def check_run(
    config: Config,
    env: Mapping[str, str],
    log: Path,
    say: preflight.Announce,
    interrupted: Callable[[], bool],
    *,
    with_actors: bool,
) -> Path:
    """Check everything that can fail before a process is started; the model folder.

    Args:
        config: of the run.
        env: environment of its processes.
        log: of what is built.
        say: told what takes time.
        interrupted: ends the building once it is true.
        with_actors: whether this host has the actors and scorers, too.

    Raises:
        ConfigError: a setting, the model or the data is wrong.
        AsyncRLError: the model could not be built.
    """
    check_adapter(config)
    if config.weights.path == "broadcast":
        sending_host(config)
    if with_actors:
        preflight.check_engine(config)
    preflight.check_verifier(config.task, env, interrupted)
    task_checks.check_data(config, env)
    if with_actors:
        roles.check_reward(config, env)
    model = preflight.ensure_model(config, env, log, say, interrupted)
    base_of(config)  # the server reads it too, and has a minute to start: it finds a large one in memory then
    if config.needs_reference:
        roles.ensure_reference(config, model, env, log, say, interrupted)
    preflight.check_limits(config, model)
    task_checks.check_chat_template(config, env, model)
    task_checks.check_environment(config, env, interrupted)
    preflight.check_shared_memory((num_published(config, model) or 0) * 4)
    return model


def check_adapter(config: Config) -> None:
    """Refuse an adapter where nothing can train one.

    Raises:
        ConfigError: peft is not installed.
    """
    if config.lora.is_on and importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"lora.rank = {config.lora.rank}, but peft is not installed on the learner's host; "
            "`pip install 'async-rl[lora]'`"
        )


def check_host(
    config: Config,
    role: str,
    env: Mapping[str, str],
    log: Path,
    say: preflight.Announce,
    interrupted: Callable[[], bool],
) -> None:
    """The same for one process of this role on this host."""
    model = preflight.ensure_model(config, env, log, say, interrupted)
    if role == "reference":
        roles.ensure_reference(config, model, env, log, say, interrupted)
        return
    if role == "actor":
        preflight.check_engine(config)
    task_checks.check_data(config, env)
    if config.reward.placement == ("actor" if role == "actor" else "scorer"):
        roles.check_reward(config, env)
    if role == "actor":
        task_checks.check_chat_template(config, env, model)
        task_checks.check_environment(config, env, interrupted)


def check_ranks(
    config: Config,
    env: Mapping[str, str],
    log: Path,
    say: preflight.Announce,
    interrupted: Callable[[], bool],
) -> None:
    """The same for a host that has ranks of the learner group alone."""
    check_adapter(config)
    model = preflight.ensure_model(config, env, log, say, interrupted)
    if config.needs_reference and config.reference.placement == "learner":
        roles.ensure_reference(config, model, env, log, say, interrupted)
