"""The command line ``async-rl``. Heavy parts are imported by the commands that need them, so ``--help`` is instant.

    run, learner ─► session.py ─► launcher.py          actor ─► actor_host.py       report, doctor, fetch, plan, presets
    launch ─► cluster_command.py ─► slurm.py, ray_run.py
    play ─► actors.control.play (a process)            export ─► control/export.py

Exit codes: 0 done; 1 the run failed; 2 a setting or argument is wrong; 130, 143 or 129 stopped by Ctrl-C, SIGTERM or a
terminal that was closed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from async_rl.bench.commands import app as bench
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.launch.cluster_command import launch

app = typer.Typer(
    name="async-rl",
    help="Asynchronous reinforcement learning: rollout actors, a staleness-bounded buffer, a learner group.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


app.add_typer(bench, name="bench")


class HostRole(StrEnum):
    """What a process on an actor host does."""

    actor = "actor"
    reward = "reward"
    reference = "reference"


Source = Annotated[str, typer.Argument(help="a preset (see async-rl presets) or a CONFIG.toml")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="change a setting, e.g. learner.lr=1e-4; repeatable"),
]
Out = Annotated[Path | None, typer.Option(help="run folder, new or empty; default: runs/NAME-TIME")]
Keys = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="keys that async-rl keys made: encrypt everything, let in only those who are known"
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="let in everyone who reaches the address; sets buffer.insecure")
]
Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT", help="run folder (its newest checkpoint) or checkpoint folder of a control run"
    ),
]
Resume = Annotated[Path | None, typer.Option(help="run folder to continue from its newest checkpoint")]
NumHosts = Annotated[int, typer.Option("--nnodes", min=1, metavar="N", help="learner hosts")]
HostIndex = Annotated[
    int, typer.Option("--node-rank", min=0, metavar="R", help="number of this learner host; 0 has the server")
]
Rendezvous = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="with several learner hosts: where the server of the first listens"),
]
Trusted = Annotated[
    bool,
    typer.Option(
        "--trusted-network",
        help="gradients between learner hosts, and weights with weights.path = broadcast, go unencrypted (gloo, NCCL): "
        "nobody else reaches their network",
    ),
]


_OF_LINKS = {"hosts", "link_gbit", "sent"}
"""Options of ``plan`` that have no effect without ``--parameters``."""
_OF_SIMULATION = {
    *("run", "tokens_per_s", "slot_tokens_per_s", "publish_s", "weights_s", "pause_s", "filtered", "lengths"),
    *("actors", "imbalance"),
}
"""Those that have none with it."""


@app.command()
def run(
    source: Annotated[str | None, typer.Argument(help="a preset or a CONFIG.toml; not needed with --resume")] = None,
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = None,
    keys: Keys = None,
    insecure: Insecure = False,
) -> None:
    """Run everything on this machine: server, learner group, actors, scorers, evaluation."""
    from async_rl.launch.interrupts import Interrupts

    settings = _with_keys(overrides, keys, insecure=insecure)
    with Interrupts() as interrupts:
        from async_rl.launch.session import run_session

        raise typer.Exit(run_session(source, settings, out, resume, interrupts, with_actors=True))


@app.command()
def learner(
    source: Annotated[str | None, typer.Argument(help="a preset or a CONFIG.toml; not needed with --resume")] = None,
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = None,
    keys: Keys = None,
    insecure: Insecure = False,
    nnodes: NumHosts = 1,
    node_rank: HostIndex = 0,
    rendezvous: Rendezvous = None,
    trusted_network: Trusted = False,
) -> None:
    """Run the buffer server, the learner group and the evaluation; actors and scorers connect from other hosts.

    With --nnodes the group is spread over that many hosts: run this on each of them.
    """
    from async_rl.hosts import LearnerHosts
    from async_rl.launch.interrupts import Interrupts

    settings = _with_keys(overrides, keys, insecure=insecure, trusted=trusted_network)
    hosts = LearnerHosts.of(nnodes, node_rank, rendezvous, trusted=trusted_network)
    with Interrupts() as interrupts:
        if not hosts.is_first:
            from async_rl.launch.learner_host import run_ranks

            raise typer.Exit(run_ranks(source, settings, out, resume, interrupts, hosts))
        from async_rl.launch.session import run_session

        raise typer.Exit(run_session(source, settings, out, resume, interrupts, with_actors=False, hosts=hosts))


@app.command()
def actor(
    source: Source,
    connect: Annotated[str, typer.Option(help="address that the learner host printed, tcp://HOST:PORT")],
    name: Annotated[
        str | None, typer.Option(help="name of this process, unique in the run; default: host, role and process id")
    ] = None,
    role: Annotated[
        HostRole, typer.Option(help="actor generates; reward and reference score what actors generated")
    ] = HostRole.actor,
    engines: Annotated[
        int, typer.Option(min=1, metavar="N", help="processes on this host, each with its own device if there are any")
    ] = 1,
    overrides: Overrides = None,
    keys: Keys = None,
    trusted_network: Trusted = False,
) -> None:
    """Run actors or scorers that serve a learner on another host, or join a run on this one, at any time."""
    from async_rl.launch.interrupts import Interrupts

    with Interrupts() as interrupts:
        from async_rl.launch.actor_host import run_actor

        settings = _with_keys(overrides, keys, trusted=trusted_network)
        raise typer.Exit(run_actor(source, settings, connect, name, role.value, interrupts, engines))


app.command()(launch)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="new or with keys; nothing is overwritten")],
) -> None:
    """Make the keys of a server and of a client, for an address that other hosts can reach."""
    from async_rl.curve import make_keys

    for file in make_keys(folder):
        typer.echo(str(file))
    typer.echo(f"on the learner host: --keys {folder}; actor hosts need client.key, client.pub and server.pub of it")


@app.command()
def presets() -> None:
    """List the configurations that ship."""
    from async_rl.config import load_any, preset_names
    from async_rl.launch.overview import in_a_line

    for name in preset_names():
        typer.echo(f"{name:20s} {in_a_line(load_any(name))}")


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="DIR", help="run folder")]) -> None:
    """Write DIR/report.html, one self-contained page of a run; works while the run goes on, too."""
    from async_rl.report.page import write_report

    typer.echo(str(write_report(folder)))


@app.command()
def plan(
    context: typer.Context,
    source: Source,
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="run folder: take the speeds that were measured there")
    ] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option(help="tokens per second of an actor with all slots full")
    ] = None,
    slot_tokens_per_s: Annotated[
        float | None, typer.Option(help="the same of one slot, in place of --tokens-per-s")
    ] = None,
    step_s: Annotated[float | None, typer.Option(help="seconds of a learner step")] = None,
    publish_s: Annotated[float | None, typer.Option(help="seconds of the learner to publish a version")] = None,
    weights_s: Annotated[float | None, typer.Option(help="seconds from there until it is live on the actors")] = None,
    pause_s: Annotated[float | None, typer.Option(help="seconds for which the swap stops an actor")] = None,
    filtered: Annotated[float | None, typer.Option(help="share of the groups that are replaced by fresh ones")] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="WHAT", help="constant, lognormal, a file of lengths or a run folder")
    ] = None,
    median: Annotated[int | None, typer.Option(help="median length of an answer, in tokens")] = None,
    actors: Annotated[str, typer.Option(metavar="N|search", help="number of actors, or try several")] = "search",
    ranks: Annotated[int | None, typer.Option(min=1, help="learner ranks; default: learner.ranks")] = None,
    imbalance: Annotated[bool, typer.Option("--imbalance", help="a step takes as long as its fullest rank")] = False,
    parameters: Annotated[
        str | None, typer.Option(metavar="7B|70B|1T", help="instead: what the links carry with a model of this size")
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, max=100_000, help="with --parameters: actor hosts")] = 1,
    link_gbit: Annotated[float, typer.Option(min=0.001, help="with --parameters: link of each host, Gbit/s")] = 100.0,
    sent: Annotated[float, typer.Option(help="with --parameters: share of a version that weights.delta sends")] = 1.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="write the plan there")] = None,
) -> None:
    """Say by simulation how many actors a learner needs and which staleness bound; nothing is started."""
    given = {
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    if useless := sorted(given & (_OF_SIMULATION if parameters is not None else _OF_LINKS)):
        option = "--from" if useless[0] == "run" else f"--{useless[0].replace('_', '-')}"
        which = "has no effect with" if parameters is not None else "has no effect without"
        raise ConfigError(f"{option} {which} --parameters: leave it away")
    if parameters is not None:
        from async_rl.plan.links_command import run_links

        run_links(
            source,
            overrides or [],
            parameters=parameters,
            hosts=hosts,
            ranks=ranks,
            step_s=step_s,
            mean_tokens=median,
            sent=sent,
            link_gbit=link_gbit,
            out=out,
        )
        return
    from async_rl.plan.command import Stated, run_plan

    stated = Stated(
        tokens_per_s=tokens_per_s,
        slot_tokens_per_s=slot_tokens_per_s,
        step_s=step_s,
        publish_s=publish_s,
        weights_s=weights_s,
        pause_s=pause_s,
        filtered=filtered,
        lengths=lengths,
        median=median,
        ranks=ranks,
    )
    run_plan(source, overrides or [], stated, actors, run, imbalance, out)


@app.command()
def doctor(
    source: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="also check this preset or CONFIG.toml")
    ] = None,
    overrides: Overrides = None,
    plant: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT",
            help="make one fault on purpose, to see that the doctor finds it: temperature, temperature-learner, shift, "
            "shift-learner, version, corrupt, missing",
        ),
    ] = None,
) -> None:
    """Check this machine and, with a configuration, everything that a run of it needs."""
    from async_rl.doctor import run_doctor

    raise typer.Exit(run_doctor(source, overrides or [], plant))


@app.command()
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path | None, typer.Option(help="folder for the files; default: CHECKPOINT/exported")] = None,
) -> None:
    """Write the policy as policy.pt (TorchScript) and policy.onnx, the normaliser inside."""
    from async_rl.control.export import export_policy

    for file in export_policy(checkpoint, out or checkpoint / "exported"):
        typer.echo(str(file))


@app.command()
def play(
    checkpoint: Checkpoint,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.gif|.mp4", help="the film; default: CHECKPOINT/play.gif")
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="to play one after the other")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="of the first episode's start")] = 0,
    max_steps: Annotated[int, typer.Option(min=1, help="leave an episode after so many steps")] = 1000,
) -> None:
    """Play episodes with the most likely actions, film them, print their returns."""
    command = [
        sys.executable,
        "-m",
        "actors.control.play",
        str(checkpoint),
        "--out",
        str(out or checkpoint / "play.gif"),
    ]
    command += ["--episodes", str(episodes), "--seed", str(seed), "--max-steps", str(max_steps)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command()
def fetch(what: Annotated[str, typer.Argument(help="smollm2")]) -> None:
    """Fetch and convert a model into the cache."""
    if what != "smollm2":
        raise ConfigError(f"fetch {what!r}: only smollm2 can be fetched; any model folder works as model.path")
    from async_rl.models import cache_dir
    from async_rl.smollm2 import fetch as fetch_smollm2

    typer.echo(str(fetch_smollm2(cache_dir())))


def _with_keys(
    overrides: list[str] | None, keys: Path | None, *, insecure: bool = False, trusted: bool = False
) -> list[str]:
    """The settings that the flags stand for, behind those that were given."""
    settings = list(overrides or [])
    if keys is not None:
        settings.append(f"buffer.keys={json.dumps(str(keys.expanduser().resolve()))}")
    if insecure:
        settings.append("buffer.insecure=true")
    if trusted:
        settings.append("weights.trusted_network=true")
    return settings


def main() -> None:
    """Run a command: what goes wrong on purpose or with the disk is one sentence on stderr, never a traceback."""
    from async_rl.output import outlive_full_disk

    outlive_full_disk()  # nor does a terminal that is closed, or a pipe whose reader has left, end it
    try:
        app()
    except AsyncRLError as error:
        print(f"async-rl: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except OSError as error:
        print(f"async-rl: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
