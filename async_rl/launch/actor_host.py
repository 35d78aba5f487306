"""``async-rl actor``: actors or scorers that serve a learner elsewhere, kept alive by the policy of a run.

arguments ─► checks ─► probe the address ─► a process per device ─► died by accident? ─► another life   janitor beside
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from async_rl.config import AnyConfig, Config, ControlConfig, load_any, to_toml
from async_rl.curve import ClientKeys
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.launch import control_checks, preflight, roles, token_checks
from async_rl.launch.commands import Commands, visible_gpus
from async_rl.launch.crew import Crew
from async_rl.launch.devices import claimed, one_each
from async_rl.launch.interrupts import Interrupts
from async_rl.launch.janitor import Janitor
from async_rl.launch.progress import make_console
from async_rl.launch.reach import check_entry, unreachable
from async_rl.launch.upkeep import Upkeep
from async_rl.runfolder import write_atomically

MAX_NAME = 200
"""Bytes of a name, to which the names of files add some; they have 255."""
PROBE_S = 5.0
"""The server's address answers within this time, or the user is told."""


def run_actor(
    source: str,
    overrides: Sequence[str],
    connect: str,
    name: str | None,
    role: str,
    interrupts: Interrupts,
    engines: int = 1,
) -> int:
    """Serve until the run has ended or the user ends it; the exit code.

    Args:
        source: preset or configuration file.
        overrides: ``KEY=VALUE``.
        connect: address of the server.
        name: unique in the run; ``None``: host and process id. Of several processes each has its number behind it.
        role: ``actor``, ``reward`` or ``reference``.
        interrupts: Ctrl-C and its like, counted from the very beginning.
        engines: processes, each with a device of its own where there are any.

    Raises:
        ConfigError: an argument, a setting, the model, the data or the keys are wrong.
        AsyncRLError: the processes are given up.
    """
    config = load_any(source, overrides)
    name = f"{socket.gethostname()}-{role}-{os.getpid()}" if name is None else _checked(name)
    preflight.check_connect(connect, config.buffer.keys)
    roles.check_role(config, role)
    folder = Path("runs") / f"actor-{name}"
    search = Path(source).resolve().parent if source.endswith(".toml") else Path.cwd()
    console = make_console()
    devices = one_each(_gpus(config, role), engines, f"--engines {engines}")
    with claimed(devices, "actor"), Janitor() as janitor:
        env = janitor.environment(preflight.child_environment(os.environ, search))
        look_for_server(connect, config, name, console)
        try:
            _check_host(config, role, env, folder, console, interrupts)
        except AsyncRLError:
            if not interrupts.count:
                raise
        if interrupts.count:
            console.print("stopped: interrupted before it began")
            return interrupts.exit_code
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "config.toml", to_toml(config))
        commands = Commands(config=folder / "config.toml", out=folder, ranks=1, is_control=config.is_control)
        names = [name] if engines == 1 else [f"{name}-{i}" for i in range(engines)]
        crew = make_crew(folder / "logs", env, dict(zip(names, devices, strict=False)), console)
        for one in names:
            console.print(f"{one} serves {connect}; log: {folder / 'logs' / one}.log", soft_wrap=True)
            command = commands.actor(connect, one) if role == "actor" else commands.scorer(connect, one, role)
            crew.add(one, role, command)
        return Upkeep(crew, interrupts, spare=[janitor.pid]).run()


def _checked(name: str) -> str:
    """A name that the run's panel can show, and files can have.

    Raises:
        ConfigError: it cannot be one.
    """
    if not name.strip() or "/" in name or not name.isprintable() or len(os.fsencode(name)) > MAX_NAME:
        raise ConfigError(
            f"--name {name[:40]!r}: folder and logs are named by it; write 1 to {MAX_NAME} signs, without / among them"
        )
    return name


def look_for_server(address: str, config: AnyConfig, name: str, console: Console) -> None:
    """Tell the user at once what keeps a server from being reached; one that is not there yet may come.

    Raises:
        ConfigError: its keys and ours do not fit.
    """
    keys = config.buffer.keys
    if why := unreachable(address, PROBE_S):
        console.print(f"nothing to serve at {address} yet: {why}; {name} goes on trying", soft_wrap=True)
    else:
        check_entry(address, ClientKeys.of(keys), keys, PROBE_S)


def make_crew(logs: Path, env: dict[str, str], devices: dict[str, str], console: Console) -> Crew:
    """A crew whose deaths the server notices by itself."""

    def note(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    return Crew(logs, env, devices, note, lambda clients: None)


def _gpus(config: AnyConfig, role: str) -> list[str]:
    """Devices that the processes of this role would use."""
    computes = isinstance(config, Config) and config.device != "cpu" and config.actors.engine != "mock"
    return visible_gpus(os.environ) if computes and role in ("actor", "reference") else []


def _check_host(
    config: AnyConfig, role: str, env: dict[str, str], out: Path, console: Console, interrupts: Interrupts
) -> None:
    """What one process of this role needs on this host."""

    def interrupted() -> bool:
        return interrupts.count > 0

    if isinstance(config, ControlConfig):
        control_checks.try_environment(config, env, out / "logs", interrupted)
    else:
        token_checks.check_host(config, role, env, out / "logs" / "warmup.log", console.print, interrupted)
