"""``async-rl launch``: the options; what it does lies in ``slurm.py`` and ``ray_run.py``.

arguments ─► Job ─┬─ --slurm ─► a batch script, submitted
                  └─ --ray   ─► a run on a cluster that is there
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from async_rl.errors import ConfigError

_SLURM, _RAY = "With --slurm", "With --ray"
"""Panels of --help; an option of one of them is refused beside the other."""


def launch(
    context: typer.Context,
    source: Annotated[
        str | None, typer.Argument(help="a preset or a CONFIG.toml; not needed with --resume", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="change a setting, e.g. learner.lr=1e-4; repeatable"),
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="submit a heterogeneous Slurm job")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="run on the Ray cluster that is there")] = False,
    out: Annotated[
        Path | None, typer.Option(help="run folder, on a file system that all nodes share; default: runs/NAME-TIME")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="run folder of an earlier launch to continue")] = None,
    learner_nodes: Annotated[int, typer.Option(min=1, help="learner hosts")] = 1,
    learner_gpus: Annotated[int, typer.Option(min=0, help="GPUs of each")] = 0,
    learner_cpus: Annotated[int | None, typer.Option(min=1, help="CPUs of each; default: one a rank, and one")] = None,
    actor_gpus: Annotated[
        int, typer.Option(min=0, help="GPUs of each actor node (Slurm), or of each actor (Ray: 0 or 1)")
    ] = 0,
    actor_cpus: Annotated[
        int | None, typer.Option(min=1, help="CPUs of each actor node or actor; default: one an engine")
    ] = None,
    trusted_network: Annotated[
        bool, typer.Option("--trusted-network", help="ranks of several learner hosts may talk unencrypted")
    ] = False,
    actor_nodes: Annotated[int, typer.Option(min=1, help="actor hosts", rich_help_panel=_SLURM)] = 1,
    engines: Annotated[
        int | None,
        typer.Option(
            min=1, help="actor processes of each; default: one a GPU, and one without", rich_help_panel=_SLURM
        ),
    ] = None,
    partition: Annotated[str | None, typer.Option(help="of all nodes", rich_help_panel=_SLURM)] = None,
    actor_partition: Annotated[str | None, typer.Option(help="of the actor nodes", rich_help_panel=_SLURM)] = None,
    account: Annotated[str | None, typer.Option(help="who pays", rich_help_panel=_SLURM)] = None,
    time: Annotated[str | None, typer.Option(help="limit, as HH:MM:SS", rich_help_panel=_SLURM)] = None,
    port: Annotated[
        int | None, typer.Option(help="of the buffer server; default: by the job's number", rich_help_panel=_SLURM)
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(help="further option of sbatch, e.g. --sbatch=--qos=high; repeatable", rich_help_panel=_SLURM),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show and check the script, submit nothing", rich_help_panel=_SLURM)
    ] = False,
    address: Annotated[
        str, typer.Option(help="HOST:PORT of the head, or auto: this host's cluster", rich_help_panel=_RAY)
    ] = "auto",
    min_actors: Annotated[int, typer.Option(min=1, help="actors at any time", rich_help_panel=_RAY)] = 1,
    max_actors: Annotated[
        int | None,
        typer.Option(min=1, help="actors while the learner hungers; default: --min-actors", rich_help_panel=_RAY),
    ] = None,
    place_s: Annotated[
        float, typer.Option(min=1, help="seconds in which it must find places", rich_help_panel=_RAY)
    ] = 120,
) -> None:
    """Start learner and actors on a cluster: a Slurm job, or processes on a Ray cluster, by the commands by hand."""
    if slurm == ray:
        raise ConfigError("say where: async-rl launch --slurm or async-rl launch --ray")
    _refuse_options(context, _RAY if slurm else _SLURM)
    from async_rl.launch.job import Job

    job = Job.of(source, overrides or [], out, resume)
    job.check_learners(learner_nodes, trusted=trusted_network)
    if learner_cpus is None and (ray or not learner_gpus):
        learner_cpus = job.learner_cpus(learner_nodes)
    if slurm:
        from async_rl.launch.slurm import run_slurm
        from async_rl.launch.slurm_script import Component, SlurmOptions

        if actor_cpus is None and not actor_gpus:
            actor_cpus = engines or 1
        options = SlurmOptions(
            learner=Component(nodes=learner_nodes, partition=partition, gpus=learner_gpus, cpus=learner_cpus),
            actor=Component(
                nodes=actor_nodes, partition=actor_partition or partition, gpus=actor_gpus, cpus=actor_cpus
            ),
            engines=engines,
            time=time,
            account=account,
            port=port,
            extra=tuple(sbatch or ()),
        )
        raise typer.Exit(run_slurm(job, options, typer.echo, dry_run=dry_run))
    from async_rl.launch.fleet_rules import FleetRules
    from async_rl.launch.progress import make_console
    from async_rl.launch.ray_run import run_ray

    rules = FleetRules.of(
        job,
        least=min_actors,
        most=max_actors or min_actors,
        learners=learner_nodes,
        learner={"CPU": float(learner_cpus or 1), "GPU": float(learner_gpus)},
        worker={"CPU": float(actor_cpus or 1), "GPU": float(actor_gpus)},
        place_s=place_s,
    )
    raise typer.Exit(run_ray(job, rules, address, make_console()))


def _refuse_options(context: typer.Context, panel: str) -> None:
    """Refuse options that were given although they have no effect here.

    Args:
        context: of the command.
        panel: of ``--help``, in which they stand.

    Raises:
        ConfigError: there is one.
    """
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if given and getattr(option, "rich_help_panel", None) == panel:
            raise ConfigError(f"{option.opts[0]} goes {panel[0].lower()}{panel[1:]}: leave it away")
