"""Tries the environment before a run starts: ``python -m actors.control.probe CONFIG.toml --out FOLDER``.

    make it, few at a time ─► reset ─► one step ─► finite numbers of the right shapes ─► FOLDER/spaces.json

What is wrong is one sentence on stderr and exit code 2. The caller sets the time limit, as it ends the process.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from actors.control.environments.base import Environment, Observations
from actors.control.environments.factory import make_environment
from actors.control.environments.quiet_end import no_quiet_end
from async_rl.config.control import ControlConfig
from async_rl.config.load import load_control
from async_rl.control.spaces import Action, Spaces
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.process import leave

_FEW = 2
"""Environments that are tried."""


def probe(config: ControlConfig) -> Spaces:
    """Make the environment, step it once, and say what it offers.

    Raises:
        ConfigError: it cannot be made, or what it gives is not what a policy can use; says what.
    """
    environment = make_environment(config, _FEW, config.seed, "probe")
    try:
        spaces = environment.spaces
        starts_alike = config.algorithm.name == "grpo"
        first = environment.reset_alike(config.seed) if starts_alike else environment.reset(config.seed)
        _check_observations(first, spaces, config.env.id, "reset")
        generator = torch.Generator().manual_seed(config.seed)
        _check_step(environment, _sample(spaces.action, generator).to(environment.device), config.env.id)
        return spaces
    finally:
        environment.close()


def _sample(action: Action, generator: torch.Generator) -> torch.Tensor:
    """Actions [few, A]: uniform choices, or a standard normal, which the environment clips."""
    if action.kind == "continuous":
        return torch.randn(_FEW, action.size, generator=generator)
    uniform = torch.rand(_FEW, action.size, generator=generator)
    return (uniform * torch.tensor(action.choices)).to(torch.int32)


def _check_step(environment: Environment, actions: torch.Tensor, env_id: str) -> None:
    """Raises ConfigError unless one step gives what :class:`~actors.control.environments.base.Step` says."""
    try:
        step = environment.step(actions)
    except AsyncRLError:
        raise
    except Exception as error:  # foreign code: whatever it raises is what is wrong with it
        raise ConfigError(
            f"env.id = {env_id!r}: a step with actions {list(actions.shape)} failed: {error!r}"
        ) from error
    _check_observations(step.observations, environment.spaces, env_id, "step")
    for what, values, dtype in (
        ("rewards", step.rewards, torch.float32),
        ("terminated", step.terminated, torch.bool),
        ("truncated", step.truncated, torch.bool),
    ):
        if values.shape != (_FEW,) or values.dtype != dtype:
            raise ConfigError(
                f"env.id = {env_id!r}: step gives {what} {list(values.shape)} of {values.dtype}; expected one for each "
                f"of {_FEW} environments, {dtype}"
            )
    if not bool(step.rewards.isfinite().all()):
        raise ConfigError(
            f"env.id = {env_id!r}: the rewards of a step are {step.rewards.tolist()}; they must be finite"
        )


def _check_observations(observations: Observations, spaces: Spaces, env_id: str, when: str) -> None:
    """Raises ConfigError unless all groups are there, of the space's shape and dtype, and finite."""
    for name, space in spaces.observations.items():
        values = observations.get(name)
        if values is None or values.shape != (_FEW, *space.shape) or values.dtype != getattr(torch, space.dtype):
            found = "missing" if values is None else f"{list(values.shape)} of {values.dtype}"
            raise ConfigError(
                f"env.id = {env_id!r}: after {when}, observation group {name!r} is {found}; expected "
                f"{[_FEW, *space.shape]} of {space.dtype}"
            )
        if not bool(values.isfinite().all()):
            raise ConfigError(
                f"env.id = {env_id!r}: after {when}, observation group {name!r} has numbers that are not finite"
            )


def main() -> None:
    """Command line of the child that the launcher starts."""
    parser = argparse.ArgumentParser(description="Try env.id and write spaces.json.")
    parser.add_argument("config")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        config = load_control(arguments.config)
        with no_quiet_end(config.env.id):
            probe(config).write(arguments.out)
    except AsyncRLError as error:
        print(f"async-rl: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    leave()


if __name__ == "__main__":
    main()
