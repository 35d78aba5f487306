"""Makes the vector environment of a gymnasium id, or says in one sentence why there is none.

auto   the environment's own vectorised form, else sync          sync   one after the other, in this process
async  a process for each environment, which dies with this one
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import DependencyNotInstalled, Error, UnregisteredEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from actors.control.environments.gymnasium_env import GymnasiumEnvironment
from async_rl.config.control import EnvConfig
from async_rl.errors import ConfigError
from async_rl.process import die_with_parent

_MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}


def make_gymnasium(
    config: EnvConfig,
    env_id: str,
    num_envs: int,
    name: str,
    device: torch.device | str,
    alike: bool,
    render: bool,
) -> GymnasiumEnvironment:
    """The environments of ``gymnasium:ID``.

    Args:
        config: section ``env``.
        env_id: without the prefix.
        num_envs: N.
        name: of this process.
        device: where tensors go.
        alike: whether they must start alike, which an environment's own vectorised form cannot.
        render: whether pictures are wanted.

    Raises:
        ConfigError: no such id, a package is missing, kwargs that it does not take, or a space that is not supported.
    """
    kwargs = config.kwargs | ({"render_mode": "rgb_array"} if render else {})
    try:
        env = _make(config, env_id, num_envs, kwargs, alike)
    except UnregisteredEnv as error:
        near = difflib.get_close_matches(env_id, gymnasium.registry, 1, 0.5)
        hint = f"; did you mean 'gymnasium:{near[0]}'?" if near else ""
        raise ConfigError(f"env.id = {config.id!r}: {error}{hint}") from None
    except (DependencyNotInstalled, ModuleNotFoundError) as error:
        if getattr(error, "name", None) == env_id.rpartition(":")[0].partition(".")[0]:
            where = "the working directory, beside the configuration file, and PYTHONPATH"
            raise ConfigError(f"env.id = {config.id!r}: {error}; it is looked for in {where}") from None
        raise ConfigError(
            f"env.id = {config.id!r}: a package is missing: pip install 'async-rl[control]' ({error})"
        ) from None
    except ConfigError:
        raise
    except (Error, Exception) as error:  # what a registered environment raises is up to it
        raise ConfigError(f"env.id = {config.id!r} with env.kwargs = {config.kwargs}: {error!r}") from error
    return GymnasiumEnvironment(env, name, device, _limit(config, env))


def _make(
    config: EnvConfig, env_id: str, num_envs: int, kwargs: dict[str, Any], alike: bool
) -> VectorEnv[Any, Any, Any]:
    mode = _MODES[config.autoreset]
    spec = _spec(env_id)
    if "mujoco" in str(spec.entry_point) and importlib.util.find_spec("mujoco") is not None:
        import mujoco  # else each environment repeats its warnings, and writes them into a file in the current folder

        mujoco.set_mju_user_warning(_warn_once)
    if config.vectorization == "auto" and spec.vector_entry_point is not None and not alike:
        env = gymnasium.make_vec(env_id, num_envs, **kwargs)
        if env.metadata.get("autoreset_mode") is mode:
            return env
        env.close()
        raise ConfigError(
            f"env.autoreset = {config.autoreset!r}: {env_id}'s own vectorised form has another mode; remove it, or set "
            "env.vectorization = 'sync'"
        )
    make = _maker(env_id, kwargs)
    if config.vectorization == "async":
        return AsyncVectorEnv([make] * num_envs, autoreset_mode=mode)
    return SyncVectorEnv([make] * num_envs, autoreset_mode=mode)


def _maker(env_id: str, kwargs: dict[str, Any]) -> Callable[[], gymnasium.Env[Any, Any]]:
    """What makes one environment, here or in a child that ends with this process and not before."""
    owner = os.getpid()

    def make() -> gymnasium.Env[Any, Any]:
        if os.getpid() != owner:
            die_with_parent(owner)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return gymnasium.make(env_id, disable_env_checker=True, **kwargs)

    return make


@functools.cache
def _warn_once(message: str) -> None:
    print(f"async-rl: warning: mujoco: {message}", file=sys.stderr, flush=True)


def _limit(config: EnvConfig, env: VectorEnv[Any, Any, Any]) -> int | None:
    given = config.kwargs.get("max_episode_steps")
    if given is not None:
        return int(given)
    return _spec(config.id.removeprefix("gymnasium:")).max_episode_steps


def _spec(env_id: str) -> EnvSpec:
    """What is registered under ``ID`` or, as gymnasium has it, ``module:ID``: importing the module registers it."""
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    return gymnasium.spec(name)
