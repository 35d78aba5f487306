"""Makes the environments of a process from ``env.id``.

gymnasium:ID ──► make_vec, or processes ──┐
                                          ├─► VectorEnv ─► GymnasiumEnvironment
module:Class ──► call(num_envs, seed, ..) ┤
                                          └─► VecEnv ────► RslEnvironment
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch

from actors.control.environments.base import Environment
from actors.control.environments.rsl_env import RslEnvironment, is_vec_env
from actors.control.environments.seeds import batch_seed, process_seed
from actors.verifiers.worker import LoadError, import_callable
from async_rl.config.control import ControlConfig
from async_rl.errors import ConfigError

GYMNASIUM = "gymnasium:"
INSTALL = "pip install 'async-rl[control]'"


def make_environment(
    config: ControlConfig,
    num_envs: int,
    seed: int,
    name: str,
    device: torch.device | str = "cpu",
    *,
    render: bool = False,
) -> Environment:
    """The environment of one process.

    Args:
        config: of which ``env`` says what to make.
        num_envs: N; ``config.env.num_envs`` for an actor.
        seed: of the run, or of this life of the process (:func:`~actors.control.environments.seeds.process_seed`).
        name: of the process, one of a kind in the run: its environments start otherwise than those of others.
        device: where a gymnasium environment's tensors go, and what a class is told that takes ``device``; else its
            own choice counts, see ``Environment.device``.
        render: whether pictures are wanted (gymnasium must know beforehand).

    Raises:
        ConfigError: there is no such environment, it cannot be made, or it is none; says what to do.
    """
    env_id = config.env.id
    if env_id.startswith(GYMNASIUM):
        _need_gymnasium(env_id)
        from actors.control.environments.gymnasium_make import make_gymnasium

        alike = config.algorithm.name == "grpo"
        return make_gymnasium(config.env, env_id.removeprefix(GYMNASIUM), num_envs, name, device, alike, render)
    module, _, attribute = env_id.partition(":")
    if not (module and attribute):
        raise ConfigError(f"env.id = {env_id!r}: expected gymnasium:ID or module:Class")
    try:
        make = import_callable(env_id, "class")
    except LoadError as error:
        raise ConfigError(f"env.id = {env_id!r}: {error}") from None
    made = _call(make, config, num_envs, batch_seed(process_seed(seed, name)), device)
    return _adapt(made, config, num_envs, name, device)


def _call(make: Callable[..., Any], config: ControlConfig, num_envs: int, seed: int, device: torch.device | str) -> Any:
    """Call the user's class or function with what it takes."""
    arguments: dict[str, Any] = {"num_envs": num_envs, "seed": seed, **config.env.kwargs}
    try:
        signature = inspect.signature(make)
    except ValueError:
        signature = None  # a builtin without a signature
    if signature is not None:
        if "device" in signature.parameters:
            arguments.setdefault("device", str(device))
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise ConfigError(
                f"env.id = {config.env.id!r} is called with {', '.join(arguments)}, and does not take that: {error}; "
                "env.kwargs must fit what it takes beside num_envs and seed"
            ) from None
    try:
        return make(**arguments)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"env.id = {config.env.id!r} with env.kwargs = {config.env.kwargs}: {error!r}") from error


def _adapt(made: Any, config: ControlConfig, num_envs: int, name: str, device: torch.device | str) -> Environment:
    """Recognise what a user's class made by what it has."""
    found = getattr(made, "num_envs", None)
    if found is not None and int(found) != num_envs:
        raise ConfigError(f"env.id = {config.env.id!r} made {found} environments instead of num_envs = {num_envs}")
    if is_vec_env(made):
        return RslEnvironment(made, name)
    if importlib.util.find_spec("gymnasium") is not None:
        from gymnasium.vector import VectorEnv

        if isinstance(made, VectorEnv):
            from actors.control.environments.gymnasium_env import GymnasiumEnvironment

            return GymnasiumEnvironment(made, name, device, getattr(made, "max_episode_steps", None))
    raise ConfigError(
        f"env.id = {config.env.id!r} made a {type(made).__name__}; expected an object with rsl_rl's VecEnv interface "
        "(get_observations, step, num_envs, num_actions) or a gymnasium.vector.VectorEnv"
    )


def _need_gymnasium(env_id: str) -> None:
    if importlib.util.find_spec("gymnasium") is None:
        raise ConfigError(f"env.id = {env_id!r} needs gymnasium: {INSTALL}")
