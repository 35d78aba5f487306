"""What is asked of the model, checked before a process is started: problems, chat template, environment.

config ─► check_data ─► check_chat_template ─► check_environment          each raises ConfigError with what to do
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from async_rl.config import Config, to_toml
from async_rl.errors import ConfigError
from async_rl.launch.children import Child, cause, ends_in_time, tail
from async_rl.tasks import load_task
from async_rl.tasks.environments import is_class
from async_rl.tasks.listing import check_repeats

ENVIRONMENT_TIMEOUT_S = 120.0
"""Most time for the imports of model and environment, beside one call."""


def check_data(config: Config, env: Mapping[str, str]) -> tuple[int, int]:
    """Read the problems; numbers of training and held-out problems.

    Raises:
        ConfigError: no such file, bad lines, no problems, or others each time.
    """
    task = config.task
    if task.environment and is_class(task.environment) and not task.data:
        check_repeats(task.environment, env)
    data = load_task(task, config.seed, env)
    if not len(data.train):
        raise ConfigError(f"task {config.task.data or config.task.name}: no problems are left to train on")
    return len(data.train), len(data.heldout)


def check_chat_template(config: Config, env: Mapping[str, str], model: Path) -> None:
    """Check that the tokenizer can wrap prompts in a chat template, if it has to; on the first problem.

    Raises:
        ConfigError: ``task.chat`` is set and the model folder holds no template, or it refuses the problem.
    """
    files = (model / "chat_template.jinja", model / "chat_template.json")
    if not config.task.chat:
        return
    settings = model / "tokenizer_config.json"
    if not any(file.is_file() for file in files) and (
        not settings.is_file() or "chat_template" not in json.loads(settings.read_text())
    ):
        raise ConfigError(f"task.chat = true, but {model} has no chat template: set task.chat = false")
    from async_rl.models import load_tokenizer
    from async_rl.tasks.prompt import encode_prompt

    try:
        encode_prompt(load_tokenizer(model), load_task(config.task, config.seed, env).train[0], config.task)
    except ValueError as error:
        raise ConfigError(f"task.chat = true: {error}; change the prompts, or set task.chat = false") from None


def check_environment(config: Config, env: Mapping[str, str], interrupted: Callable[[], bool] = lambda: False) -> str:
    """Begin one episode in a process of its own, see ``actors.environments.check``; a sentence.

    Args:
        config: with ``task.environment`` or without.
        env: environment of that process.
        interrupted: ends it once it is true.

    Raises:
        ConfigError: the environment cannot be played with this model; says why.
        AsyncRLError: ``interrupted`` became true.
    """
    if not config.task.environment:
        return "none; one answer to each prompt"
    with tempfile.TemporaryDirectory(prefix="async-rl-environment-") as scratch:
        toml, log = Path(scratch) / "config.toml", Path(scratch) / "log"
        toml.write_text(to_toml(config))
        child = Child.start("environment", [sys.executable, "-m", "actors.environments.check", str(toml)], log, env)
        limit_s = ENVIRONMENT_TIMEOUT_S + config.task.timeout_s
        if not ends_in_time(child, limit_s, "the environment was tried", interrupted):
            raise ConfigError(f"task.environment = {config.task.environment!r}: one episode took over {limit_s:.0f} s")
        if child.exit_code:
            raise ConfigError(cause(log) or f"task.environment: {' '.join(tail(log, 1)) or child.describe_end()}")
        return f"{config.task.environment}: {' '.join(tail(log, 1))}"
