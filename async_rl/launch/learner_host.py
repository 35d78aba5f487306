"""``async-rl learner --node-rank R``: the ranks of a further learner host, kept alive by the policy of a run.

arguments ─► checks ─► probe the server ─► torchrun, or one rank ─► died by accident? ─► another life     janitor beside

The server, the evaluator and rank 0 are on the first host. These ranks muster there (:mod:`async_rl.buffer.muster`);
they need neither a shared folder nor anything else of that host.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from async_rl.config import AnyConfig, ControlConfig, load_any, to_toml
from async_rl.control.spaces import Spaces
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.hosts import LearnerHosts
from async_rl.launch import control_checks, preflight, token_checks
from async_rl.launch.actor_host import look_for_server, make_crew
from async_rl.launch.commands import Commands, visible_gpus
from async_rl.launch.devices import claimed, one_each
from async_rl.launch.folder_lock import FolderLock
from async_rl.launch.interrupts import Interrupts
from async_rl.launch.janitor import Janitor
from async_rl.launch.launcher import WIND_DOWN_S
from async_rl.launch.progress import make_console
from async_rl.launch.upkeep import Upkeep
from async_rl.runfolder import write_atomically


def run_ranks(
    source: str | None,
    overrides: Sequence[str],
    out: Path | None,
    resume: Path | None,
    interrupts: Interrupts,
    hosts: LearnerHosts,
) -> int:
    """Train until the run has ended or the user ends it; the exit code.

    Args:
        source: preset or configuration file; not needed with ``resume``.
        overrides: ``KEY=VALUE``.
        out: run folder, as this host names it; shared with the first host or not.
        resume: the same, of a run that is continued.
        interrupts: Ctrl-C and its like, counted from the very beginning.
        hosts: all learner hosts; this is not the first.

    Raises:
        ConfigError: an argument, a setting, the model or the keys are wrong.
        AsyncRLError: the ranks are given up.
    """
    run_folder = (resume or out or Path("runs") / "learner").resolve()
    own = hosts.folder(run_folder)
    if source is None and resume is not None and (own / "config.toml").is_file():
        source = str(own / "config.toml")
    if source is None:
        raise ConfigError(
            f"{own} holds no config.toml: name the preset or CONFIG.toml with which the first host was started"
        )
    config = load_any(source, overrides)
    ranks = hosts.ranks_here(config.learner.ranks)
    preflight.check_connect(hosts.address, config.buffer.keys)
    own.mkdir(parents=True, exist_ok=True)
    search = Path(source).resolve().parent if source.endswith(".toml") else Path.cwd()
    console = make_console()
    gpus = one_each([] if config.device == "cpu" else visible_gpus(os.environ), ranks, f"{ranks} ranks a host")
    with FolderLock(own, interrupts, console.print) as lock, claimed(gpus, "learner"), Janitor([lock]) as janitor:
        env = janitor.environment(preflight.child_environment(os.environ, search))
        name = f"host{hosts.index}"
        look_for_server(hosts.address, config, name, console)
        try:
            _check(config, env, own, console, interrupts)
        except AsyncRLError:
            if not interrupts.count:
                raise
        if interrupts.count:
            console.print("stopped: interrupted before it began")
            return interrupts.exit_code
        write_atomically(own / "config.toml", to_toml(config))
        commands = Commands(
            config=own / "config.toml", out=run_folder, ranks=ranks, is_control=config.is_control, hosts=hosts
        )
        crew = make_crew(own / "logs", env, {"learner": ",".join(gpus)} if gpus else {}, console)
        first = hosts.index * ranks
        which = f"rank {first}" if ranks == 1 else f"ranks {first} to {first + ranks - 1}"
        log = own / "logs" / "learner.log"
        console.print(f"{which} of {config.learner.ranks} at {hosts.address}; log: {log}", soft_wrap=True)
        console.print("Ctrl-C ends the whole run in order, a second one the processes of this host at once")
        crew.add("learner", "learner", commands.learner(hosts.address), ranks).lives.is_guest = True
        # the ranks of all hosts end their step together, and the first writes a checkpoint
        return Upkeep(crew, interrupts, spare=[janitor.pid], grace_s=WIND_DOWN_S).run()


def _check(config: AnyConfig, env: dict[str, str], own: Path, console: Console, interrupts: Interrupts) -> None:
    """What ranks need on this host: the model, or what the environment offers."""

    def interrupted() -> bool:
        return interrupts.count > 0

    if not isinstance(config, ControlConfig):
        token_checks.check_ranks(config, env, own / "logs" / "warmup.log", console.print, interrupted)
    elif config.env.spaces:
        Spaces.read(Path(config.env.spaces))
    else:
        control_checks.try_environment(config, env, own / "logs", interrupted).write(own)
