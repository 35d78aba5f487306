"""A command of the user from its arguments to its exit code: configure, check, launch, sum up.

arguments ─► config + run folder ─► preflight ─► overview ─► launcher ─► summary.json, trace.json, report.html
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from async_rl.buffer import journal
from async_rl.config import AnyConfig, Config, ControlConfig, RunConfig, load_any, to_toml
from async_rl.control.spaces import Spaces
from async_rl.curve import ClientKeys, is_loopback
from async_rl.errors import AsyncRLError, ConfigError, SchemaError
from async_rl.hosts import ONE_HOST, LearnerHosts
from async_rl.launch import control_checks, preflight, token_checks
from async_rl.launch.commands import Commands, assign_gpus, visible_gpus
from async_rl.launch.devices import check_broadcast, claimed
from async_rl.launch.folder_lock import FolderLock
from async_rl.launch.interfaces import Monitor, Outcome
from async_rl.launch.interrupts import Interrupts
from async_rl.launch.janitor import Janitor
from async_rl.launch.launcher import Launcher, scorer_names
from async_rl.launch.overview import num_parameters, print_overview
from async_rl.launch.progress import make_console, make_display
from async_rl.report.trace import write_trace
from async_rl.route import joined, parted, route_to
from async_rl.runfolder import RunFolder, model_folder, write_atomically
from async_rl.summary import write_summary

_TOKEN_CONTRACT = "model, adapter (lora), task, sampling, rewards, reference"


def run_session(
    source: str | None,
    overrides: Sequence[str],
    out: Path | None,
    resume: Path | None,
    interrupts: Interrupts,
    *,
    with_actors: bool,
    hosts: LearnerHosts = ONE_HOST,
) -> int:
    """``async-rl run`` and ``async-rl learner``; the exit code.

    Args:
        source: preset or configuration file; not needed with ``resume``.
        overrides: ``KEY=VALUE``.
        out: run folder.
        resume: run folder to continue.
        interrupts: Ctrl-C and its like, counted from the very beginning.
        with_actors: whether actors and scorers are started here, too.
        hosts: over which the learner group is spread; this is the first of them.

    Raises:
        ConfigError: an argument, a setting, the model, the data or the address is wrong.
        AsyncRLError: the model could not be built, or the run failed.
    """
    began = time.monotonic()
    console = make_console()
    rendezvous = _bind_to_rendezvous(overrides, hosts)
    overrides, setting = [*overrides, *rendezvous], "--rendezvous" if rendezvous else "buffer.bind"
    place = _place(source, overrides, out, resume)
    with FolderLock(place, interrupts, console.print) as lock, Janitor([lock]) as janitor:
        # looked at under the lock: whoever held it may have left files and checkpoints
        config, folder, checkpoint = _configure(source, overrides, None if resume else place, resume)
        search = Path(source).resolve().parent if source and source.endswith(".toml") else Path.cwd()
        janitor.watch(folder)
        env = janitor.environment(preflight.child_environment(os.environ, search))
        try:
            hosts.ranks_here(config.learner.ranks)
            found = _check(config, env, folder, console, interrupts, setting, with_actors=with_actors)
        except (AsyncRLError, OSError):
            if not any(folder.iterdir()):
                folder.rmdir()
            if interrupts.count:
                return _end_early(folder, interrupts, began, console)
            raise
        if interrupts.count:
            return _end_early(folder, interrupts, began, console)
        print_overview(console, config, found, folder)
        write_atomically(folder / "config.toml", to_toml(config))
        if isinstance(found, Spaces):
            found.write(folder)
        outcome = _launch(
            config, folder, checkpoint, env, console, interrupts, hosts, spare=[janitor.pid], with_actors=with_actors
        )
        return _finish(folder, outcome, console, "run" if with_actors else "learner")


def _bind_to_rendezvous(overrides: Sequence[str], hosts: LearnerHosts) -> list[str]:
    """The setting with which the server listens where all learner hosts look for it, unless an address is given.

    Raises:
        ConfigError: the name of the host is unknown, or stands for a loopback address here, which others cannot reach.
    """
    if hosts.count == 1 or any(override.startswith("buffer.bind=") for override in overrides):
        return []
    name, port = parted(hosts.address)
    _, host = route_to(hosts.address)
    if is_loopback(host) and not is_loopback(name):
        raise ConfigError(f"--rendezvous {name}:{port}: {name} is {host} here; give this host's address in the network")
    return [f"buffer.bind=tcp://{joined(host, port)}"]


def _end_early(out: Path, interrupts: Interrupts, began: float, console: Console) -> int:
    """Interrupted before a process of the run was started; the exit code."""
    reason = "interrupted before the run began"
    wall_s = time.monotonic() - began
    code = interrupts.exit_code
    if out.is_dir():
        outcome = Outcome(status="stopped", reason=reason, exit_code=code, wall_s=wall_s, cpu_s={}, restarts={})
        write_summary(out, outcome)
    console.print(f"stopped: {reason}")
    return code


def _place(source: str | None, overrides: Sequence[str], out: Path | None, resume: Path | None) -> Path:
    """The run folder, made if it is new."""
    if resume is None:
        if source is None:
            raise ConfigError("name a preset or a CONFIG.toml (async-rl presets lists what ships), or use --resume DIR")
        config = load_any(source, overrides)
        return preflight.prepare_out(out or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if out is not None and out.resolve() != resume.resolve():
        raise ConfigError("--resume continues in the run's own folder; leave --out away")
    if not (resume / "config.toml").is_file():
        raise ConfigError(f"--resume {resume}: no config.toml there, so it is no run folder")
    _refuse_running(resume)
    return resume.resolve()


def _configure(
    source: str | None, overrides: Sequence[str], out: Path | None, resume: Path | None
) -> tuple[AnyConfig, Path, Path | None]:
    """Configuration, run folder and, when resuming, the checkpoint."""
    folder = _place(source, overrides, out, resume)
    if resume is None:
        assert source is not None
        return load_any(source, overrides), folder, None
    config = load_any(source or str(resume / "config.toml"), overrides)
    before = load_any(str(resume / "config.toml"))
    if config.contract_hash() != before.contract_hash():
        what = "environment, observations, networks, episodes" if config.is_control else _TOKEN_CONTRACT
        raise ConfigError(f"--resume {resume}: {what} and seed must stay as in {resume / 'config.toml'}")
    checkpoint = _newest_whole(resume)
    if checkpoint is None:
        print(f"--resume {resume}: it ended before its first checkpoint, so it begins again", flush=True)
        return config, folder, None
    _refuse_other_networks(config, resume, checkpoint)
    done = int(checkpoint.name.removeprefix("step_"))
    has_completed = RunFolder(resume).summary.get("status") == "completed"
    if done > config.steps or (done == config.steps and has_completed):  # else the last evaluation may be missing
        raise ConfigError(
            f"--resume {resume}: all {config.steps} steps are done; go further with --set steps={2 * done}"
        )
    return config, folder, checkpoint.resolve()


def _newest_whole(resume: Path) -> Path | None:
    """The newest checkpoint whose files can be read; those that cannot are named and passed over.

    Raises:
        ConfigError: there are checkpoints, but none is whole, or another version of this package wrote them.
    """
    damaged: ConfigError | None = None
    for checkpoint in RunFolder(resume).checkpoints():
        try:
            num_parameters(model_folder(checkpoint))
            journal.load(checkpoint)
            return checkpoint
        except SchemaError as error:
            raise ConfigError(f"--resume {resume}: {checkpoint}: {error}") from None
        except ConfigError as error:
            print(f"async-rl: warning: {checkpoint} is passed over: {error}", flush=True)
            damaged = error
    if damaged is not None:
        raise ConfigError(f"--resume {resume}: none of its checkpoints is whole; start a new run ({damaged})")
    return None


def _refuse_other_networks(config: AnyConfig, resume: Path, checkpoint: Path) -> None:
    """The learner would refuse them too, but with its configuration already in the run folder.

    Raises:
        ConfigError: a setting that the checkpoint's networks were made with has changed; names it.
    """
    source = checkpoint / "config.toml" if config.is_control else resume / "config.toml"
    kept, wanted = load_any(str(source)).kept(), config.kept()
    for key in kept:
        if wanted.get(key) != kept[key]:
            raise ConfigError(
                f"--resume {resume}: {key} must stay {kept[key]!r} as in {source}, not {wanted.get(key)!r}: the "
                "checkpoint's networks were made with it; set it back, or start a new run"
            )


def _refuse_running(folder: Path) -> None:
    """Two runs in one folder would write the same files.

    Raises:
        ConfigError: a server still serves it on this host.
    """
    pid = RunFolder(folder).server.get("pid")
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return
    if "async_rl.buffer.server" in command and f"{folder.resolve()}/" in command:
        raise ConfigError(f"--resume {folder}: its run still goes on (server process {pid}); stop that one first")


def _check(
    config: AnyConfig,
    env: dict[str, str],
    out: Path,
    console: Console,
    interrupts: Interrupts,
    setting: str,
    *,
    with_actors: bool,
) -> Path | Spaces:
    """Everything that can fail before a process is started; the model folder, or what the environment offers."""

    def interrupted() -> bool:
        return interrupts.count > 0

    preflight.check_address(config.buffer, setting)
    if isinstance(config, ControlConfig):
        return control_checks.check_run(config, env, out / "logs", interrupted, with_actors=with_actors)
    log = out / "logs" / "warmup.log"
    return token_checks.check_run(config, env, log, console.print, interrupted, with_actors=with_actors)


def _launch(
    config: RunConfig,
    out: Path,
    checkpoint: Path | None,
    env: dict[str, str],
    console: Console,
    interrupts: Interrupts,
    hosts: LearnerHosts,
    *,
    spare: Sequence[int],
    with_actors: bool,
) -> Outcome:
    from async_rl.client import Client
    from async_rl.weights.segment import unlink_run

    keys = ClientKeys.of(config.buffer.keys)

    def monitor(address: str) -> Monitor:
        if not with_actors:
            for role in ("actor", *config.stages):
                flag = "" if role == "actor" else f" --role {role}"
                where = _reachable(address, config)
                who = "actors" if role == "actor" else f"{role} scorers"
                console.print(f"{who} connect with: async-rl actor CONFIG.toml{flag} --connect {where}")
        for index in range(1, hosts.count):
            console.print(
                f"learner host {index} joins with: async-rl learner CONFIG.toml {hosts.options(index)}",
                soft_wrap=True,
            )
        return Client(address, "monitor", f"launcher-{os.getpid()}", config.contract_hash(), keys=keys)

    ranks = hosts.ranks_here(config.learner.ranks)
    actors = config.actors.count if with_actors else 0
    scorers = _scorers(config) if with_actors and isinstance(config, Config) else {}
    evaluates = with_actors or not (isinstance(config, ControlConfig) and config.env.spaces)
    if not evaluates:
        console.print("no evaluation: with env.spaces this host is not asked to make the environment")
    gpus = [] if config.device == "cpu" else visible_gpus(env)
    mine = [] if with_actors else gpus[:ranks]
    assigned = assign_gpus(gpus, ranks, actors, _with_model(config, scorers), colocated=config.actors.colocated)
    if config.weights.path == "broadcast":
        check_broadcast(assigned, actors)
    with claimed(mine, "learner"), make_display(console, config) as display:
        return Launcher(
            commands=Commands(
                config=out / "config.toml",
                out=out,
                ranks=ranks,
                resume=checkpoint,
                is_control=config.is_control,
                hosts=hosts,
            ),
            env=env,
            gpus=assigned,
            actors=actors,
            scorers=scorers,
            evaluates=evaluates,
            display=display,
            interrupts=interrupts,
            monitor=monitor,
            cleanup=unlink_run,
            heartbeat_s=config.buffer.heartbeat_s,
            spare=spare,
        ).run()


def _scorers(config: Config) -> dict[str, int]:
    """Scorers that a run starts on this machine, by stage."""
    counts = {"reward": config.reward.scorers, "reference": config.reference.scorers}
    return {stage: counts[stage] for stage in config.stages}


def _with_model(config: RunConfig, scorers: Mapping[str, int]) -> list[str]:
    """Names of the scorers that hold a model."""
    has_model = isinstance(config, Config) and config.reward.model != 0
    return [name for name, role in scorer_names(scorers) if role == "reference" or has_model]


def _reachable(address: str, config: RunConfig) -> str:
    """The address as another host would write it."""
    host = config.buffer.bind.removeprefix("tcp://").rpartition(":")[0]
    everywhere = host in ("0.0.0.0", "*", "[::]")
    return f"tcp://{socket.gethostname()}:{address.rpartition(':')[2]}" if everywhere else address


def _finish(out: Path, outcome: Outcome, console: Console, command: str) -> int:
    """Write what sums the run up, say how it ended and with which command it goes on; the exit code."""
    from async_rl.report.page import write_report

    try:
        summary = write_summary(out, outcome)
        write_trace(out)
        page = write_report(out)
    except OSError as error:
        raise AsyncRLError(f"the run {outcome.status}: {outcome.reason}\n{out} cannot be written: {error}") from None
    if outcome.status == "failed":
        raise AsyncRLError(f"the run failed: {outcome.reason}\nreport: {page}")
    took = f"{summary['steps']} steps, {outcome.wall_s:.0f} s"
    console.print(f"{outcome.status} after {took}: {outcome.reason}; report: {page}")
    if summary["bottleneck"]:
        console.print(summary["bottleneck"])
    if outcome.status == "stopped" and RunFolder(out).latest_checkpoint():
        console.print(f"continue with: async-rl {command} --resume {out}")
    return outcome.exit_code
