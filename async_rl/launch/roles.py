"""What the roles beside actor and learner need before a run starts: reward sources and the reference model.

config ─► check_reward, ensure_reference          each raises ConfigError with what to do
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from async_rl.config import AnyConfig, Config
from async_rl.errors import ConfigError
from async_rl.launch.preflight import CLASSIFIER, Announce, check_model_folder, ensure_folder
from async_rl.tasks.template import names_in


def check_role(config: AnyConfig, role: str) -> None:
    """Check that a process of this role has something to do in this run.

    Raises:
        ConfigError: the stage is computed elsewhere, or not at all.
    """
    if role != "actor" and not isinstance(config, Config):
        raise ConfigError(
            f"--role {role}: environments give their rewards themselves, so a control run has no {role} scorers; "
            "leave --role away for an actor"
        )
    if role != "actor" and role not in config.stages:
        idle = role == "reference" and not config.needs_reference
        why = "nothing in [algorithm] reads a reference" if idle else f"set {role}.placement = 'scorer' for the run"
        raise ConfigError(f"--role {role}: no {role} scorer is needed; {why}")


def check_reward(config: Config, env: Mapping[str, str] | None = None) -> None:
    """Check the sources of ``[reward]`` that have a weight.

    Args:
        config: of the run.
        env: environment of a process that runs the user's code; None: this one's.

    Raises:
        ConfigError: the reward model's folder, the judge's address or what it is asked is wrong.
    """
    if config.reward.model != 0:
        check_model_folder(Path(config.reward.model_path).expanduser(), "reward.model_path", CLASSIFIER)
    if config.reward.judge != 0:
        check_judge_url(config.reward.judge_url)
        check_judge_prompt(config, env)


def check_judge_url(url: str) -> None:
    """Check the form of ``reward.judge_url``.

    Raises:
        ConfigError: it is not ``http(s)://HOST...``.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"reward.judge_url = {url!r}: write it as http://HOST:PORT/v1, the base address of the API")
    if url.rstrip("/").endswith("/chat/completions"):
        raise ConfigError(f"reward.judge_url = {url!r}: leave /chat/completions away, it is added")


def check_judge_prompt(config: Config, env: Mapping[str, str] | None = None) -> None:
    """Check the names in braces of ``reward.judge_prompt`` against the columns of the data.

    Raises:
        ConfigError: the answer is not in it, or a name is no column.
    """
    from async_rl.tasks import load_task

    columns = load_task(config.task, config.seed, env).train[0].columns
    known = ["prompt", "completion", "finish_reasons", *columns]
    named = names_in(config.reward.judge_prompt)
    if "completion" not in named:
        raise ConfigError("reward.judge_prompt has no {completion}: the judge would not see the answer")
    unknown = [name for name in named if name not in known]
    if unknown:
        raise ConfigError(
            f"reward.judge_prompt: {{{unknown[0]}}} is not filled in; known are {', '.join(known)} (write text that is "
            "to stay as it is without braces)"
        )


def ensure_reference(
    config: Config, model: Path, env: Mapping[str, str], log: Path, say: Announce, interrupted: Callable[[], bool]
) -> Path:
    """The reference's folder, which must read the same tokens as the model; built or fetched where it has a short name.

    Args:
        config: with a reference.
        model: folder of the model.
        env: environment of the process that builds.
        log: its log.
        say: told what takes time.
        interrupted: ends the building once it is true.

    Raises:
        ConfigError: no model is there, or it has another vocabulary.
    """
    if config.reference.path in ("", config.model.path):
        return model
    folder = ensure_folder(config.reference.path, "reference.path", env, log, say, interrupted)
    check_same_vocabulary(model, folder)
    return folder


def check_same_vocabulary(model: Path, reference: Path) -> None:
    """Check that both give every token the same number: the reference is asked about the model's tokens.

    Raises:
        ConfigError: they do not; names a token.
    """
    from async_rl.models import load_tokenizer, vocabulary_size

    ours, theirs = (load_tokenizer(folder).get_vocab() for folder in (model, reference))
    if ours != theirs:
        token = min(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        raise ConfigError(
            f"reference.path = {str(reference)!r} has another vocabulary than {model}: {token!r} is token "
            f"{theirs.get(token)} there and {ours.get(token)} here; a reference or teacher must share the tokenizer"
        )
    if (size := vocabulary_size(reference)) <= max(ours.values()):
        raise ConfigError(
            f"reference.path = {str(reference)!r} has {size} tokens, but its tokenizer goes up to {max(ours.values())}"
        )
