"""``async-rl actor``: one actor or scorer that serves a learner elsewhere, kept alive by the policy of a run.

arguments ─► checks ─► probe the address ─► child ─► died by accident? ─► another life          janitor beside it
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from async_rl.config import AnyConfig, ControlConfig, load_any, to_toml
from async_rl.errors import AsyncRLError
from async_rl.launch import control_checks, preflight, roles, token_checks
from async_rl.launch.children import Child, end_all, end_descendants
from async_rl.launch.commands import Commands
from async_rl.launch.ending import describe
from async_rl.launch.interrupts import Interrupts
from async_rl.launch.janitor import Janitor
from async_rl.launch.policy import Lives, is_hopeless
from async_rl.launch.progress import make_console
from async_rl.runfolder import write_atomically

WORKED_S = 60.0
"""A life of this length has worked: from here nobody sees more of it."""
PROBE_S = 5.0
"""The server's address answers within this time, or the user is told."""
_GREETING = 10
"""Bytes that a ZeroMQ peer sends first: 0xff, eight of any value, 0x7f."""
_GRACE_S = 4.0
_CHECK_S = 60.0


def run_actor(
    source: str, overrides: Sequence[str], connect: str, name: str | None, role: str, interrupts: Interrupts
) -> int:
    """Serve until the run has ended or the user ends it; the exit code.

    Args:
        source: preset or configuration file.
        overrides: ``KEY=VALUE``.
        connect: address of the server.
        name: unique in the run; ``None``: host and process id.
        role: ``actor``, ``reward`` or ``reference``.
        interrupts: Ctrl-C and its like, counted from the very beginning.

    Raises:
        ConfigError: an argument, a setting, the model or the data is wrong.
        AsyncRLError: the process is given up.
    """
    config = load_any(source, overrides)
    name = name or f"{socket.gethostname()}-{role}-{os.getpid()}"
    preflight.check_connect(connect, config.buffer.keys)
    roles.check_role(config, role)
    folder = Path("runs") / f"actor-{name}"
    search = Path(source).resolve().parent if source.endswith(".toml") else Path.cwd()
    console = make_console()
    with Janitor() as janitor:
        env = janitor.environment(preflight.child_environment(os.environ, search))
        if why := unreachable(connect, PROBE_S):
            console.print(f"nothing to serve at {connect} yet: {why}; {name} goes on trying", soft_wrap=True)
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
        log = folder / "logs" / f"{name}.log"
        console.print(f"{name} serves {connect}; log: {log}")
        command = commands.actor(connect, name) if role == "actor" else commands.scorer(connect, name, role)
        return keep_alive(name, command, log, env, console, interrupts, spare=[janitor.pid])


def unreachable(address: str, timeout_s: float) -> str | None:
    """Why no server of ours seems to listen there; ``None`` if one does.

    Args:
        address: ``tcp://HOST:PORT``.
        timeout_s: longest wait.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    deadline = time.monotonic() + timeout_s
    greeting = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as line:
            while len(greeting) < _GREETING:
                line.settimeout(max(0.01, deadline - time.monotonic()))
                if not (part := line.recv(_GREETING - len(greeting))):
                    break
                greeting += part
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:  # a wrong name, port or network
        return error.strerror or str(error)
    is_ours = len(greeting) == _GREETING and greeting[0] == 0xFF and greeting[-1] == 0x7F
    return None if is_ours else "what listens there is no buffer server"


def keep_alive(
    name: str,
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    console: Console,
    interrupts: Interrupts,
    spare: Collection[int] = (),
) -> int:
    """Run the command until it ends well, is interrupted, or has died too often; the exit code.

    Args:
        name: of the process, for messages.
        command: what is run.
        log: of all its lives.
        env: environment.
        console: where restarts are told.
        interrupts: ends it.
        spare: process ids below this one that live on.

    Raises:
        AsyncRLError: it is given up; with the end of its log.
    """
    lives = Lives()
    while True:
        child = _live(name, command, log, env, interrupts, spare)
        now = time.monotonic()
        if interrupts.count:
            return interrupts.exit_code
        if child.exit_code == 0:
            return 0
        if now - child.started > WORKED_S:
            lives.work()
        if not lives.end(now, hopeless=is_hopeless(child.exit_code or 0, child.sentence())):
            raise AsyncRLError(describe(child))
        console.print(f"{name} {child.describe_end()} and starts again; see {log}", soft_wrap=True)
        while not interrupts.count and not lives.is_due(time.monotonic()):
            interrupts.wait(min(_CHECK_S, (lives.next_at or 0.0) - time.monotonic()))
        if interrupts.count:
            return interrupts.exit_code
        lives.begin()


def _live(
    name: str,
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    interrupts: Interrupts,
    spare: Collection[int],
) -> Child:
    """One life, until its end or an interrupt; nothing that it started is left."""
    child = Child.start(name, command, log, env)
    handle = os.pidfd_open(child.pid)
    try:
        while child.poll() is None and not interrupts.count:
            interrupts.wait(_CHECK_S, [handle])
    finally:
        os.close(handle)
        end_all([child], _GRACE_S)
        end_descendants(spare)
    return child


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
