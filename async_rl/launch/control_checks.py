"""What a control run needs before its processes start: an environment that can be made, networks that fit it, files.

config ─► env.spaces, or a child that makes the environment and steps it once ─► Spaces ─► groups, files, /dev/shm
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from async_rl.config import ControlConfig, to_toml
from async_rl.control.spaces import FILE, Spaces
from async_rl.errors import ConfigError
from async_rl.launch import preflight
from async_rl.launch.children import Child, ends_in_time, tail
from async_rl.launch.control_overview import describe_networks
from async_rl.shipped import find_shipped

PROBE_TIMEOUT_S = 300.0
"""A simulator may take minutes to start."""


def check_run(
    config: ControlConfig, env: Mapping[str, str], scratch: Path, interrupted: Callable[[], bool], *, with_actors: bool
) -> Spaces:
    """Check everything that can fail before a process is started; what the environment offers.

    Args:
        config: of the run.
        env: environment of its processes.
        scratch: folder for the probe's log and result.
        interrupted: ends the probe once it is true.
        with_actors: whether this host has the actors, too, and so must be able to make the environment.

    Raises:
        ConfigError: the environment cannot be made, the networks do not fit it, or a file is missing.
        AsyncRLError: ``interrupted`` became true.
    """
    _check_files(config)
    if config.env.spaces and not with_actors:
        spaces = Spaces.read(Path(config.env.spaces))
    else:
        spaces = try_environment(config, env, scratch, interrupted)
    check_groups(config, spaces)
    check_deviation(config, spaces)
    networks = describe_networks(config, spaces)
    preflight.check_shared_memory(networks.published_bytes)
    return spaces


def try_environment(
    config: ControlConfig, env: Mapping[str, str], scratch: Path, interrupted: Callable[[], bool]
) -> Spaces:
    """Make the environment in a child process, which steps it once.

    Raises:
        ConfigError: it cannot be made, or does not behave; with the child's own sentence.
        AsyncRLError: ``interrupted`` became true.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    toml, log = scratch / "probe.toml", scratch / "probe.log"
    toml.write_text(to_toml(config))
    (scratch / FILE).unlink(missing_ok=True)
    command = [sys.executable, "-m", "actors.control.probe", str(toml), "--out", str(scratch)]
    child = Child.start("probe", command, log, env)
    if not ends_in_time(child, PROBE_TIMEOUT_S, "the environment was tried", interrupted, grace_s=2.0):
        raise ConfigError(f"env.id = {config.env.id!r}: making it took more than {PROBE_TIMEOUT_S:g} s; see {log}")
    if child.exit_code:
        how = f"env.id = {config.env.id!r}: trying it failed: the probe {child.describe_end()}; {_end_of(log)}"
        raise ConfigError(child.cause() or how)
    if not (scratch / FILE).is_file():
        raise ConfigError(
            f"env.id = {config.env.id!r}: it ended the process that tried it, with exit code 0; see {log}"
        )
    return Spaces.read(scratch / FILE)


def check_groups(config: ControlConfig, spaces: Spaces) -> None:
    """Check that the environment has the observation groups that the networks read.

    Raises:
        ConfigError: it has not, or they are not flat where an MLP reads them.
    """
    for network in ("actor", "critic", "teacher", "rnd", "discriminator"):
        groups = config.groups_of(network)
        if config.policy.network != "transformer":
            spaces.size_of(groups)
        elif missing := [group for group in groups if group not in spaces.observations]:
            raise ConfigError(
                f"observations.{network}: there is no group {missing[0]!r}; the environment has "
                f"{', '.join(spaces.observations)}"
            )


def check_deviation(config: ControlConfig, spaces: Spaces) -> None:
    """Refuse settings of the Gaussian's deviation where actions are choices.

    Raises:
        ConfigError: names the setting, which has no effect.
    """
    policy = config.policy
    for name in ("std", "init_std"):
        value = getattr(policy, name)
        if spaces.action.kind == "discrete" and value != type(policy).model_fields[name].default:
            raise ConfigError(
                f"policy.{name} = {value!r} has no effect in {config.env.id!r}, whose actions are choices; remove it"
            )


def _check_files(config: ControlConfig) -> None:
    """Files that the learner would miss only once it has started."""
    if config.amp.style_weight > 0 and find_shipped(config.amp.expert) is None:
        raise ConfigError(f"amp.expert = {config.amp.expert!r}: no such file; scripts/record_expert.py writes one")
    if config.algorithm.name == "distillation" and find_shipped(config.teacher.path) is None:
        raise ConfigError(f"teacher.path = {config.teacher.path!r}: no such folder; name the run folder of the teacher")


def _end_of(log: Path) -> str:
    lines = "\n".join(f"  {line}" for line in tail(log, 8))
    return f"last lines of {log}:\n{lines}" if lines else f"{log} is empty"
