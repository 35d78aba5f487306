"""``async-rl launch``: the options; what it does lies in ``slurm.py`` and ``ray_run.py``.

arguments ─► Job ─┬─ --slurm ─► a batch script, submitted
                  └─ --ray   ─► a run on a cluster that is there
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from async_rl.errors import ConfigError


def launch(
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
    learner_cpus: Annotated[int | None, typer.Option(min=1, help="CPUs of each")] = None,
    actor_gpus: Annotated[int, typer.Option(min=0, help="GPUs of each actor node (Slurm) or actor (Ray)")] = 0,
    actor_cpus: Annotated[int | None, typer.Option(min=1, help="CPUs of each actor node or actor")] = None,
    trusted_network: Annotated[
        bool, typer.Option("--trusted-network", help="ranks of several learner hosts may talk unencrypted")
    ] = False,
    actor_nodes: Annotated[int, typer.Option(min=1, help="Slurm: actor hosts")] = 1,
    engines: Annotated[
        int | None, typer.Option(min=1, help="Slurm: actor processes of each; default: one a GPU, and one without")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm: of all nodes")] = None,
    actor_partition: Annotated[str | None, typer.Option(help="Slurm: of the actor nodes")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm: who pays")] = None,
    time: Annotated[str | None, typer.Option(help="Slurm: limit, as HH:MM:SS")] = None,
    port: Annotated[int | None, typer.Option(help="Slurm: of the buffer server; default: by the job's number")] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="Slurm: further option of sbatch, e.g. --sbatch=--qos=high; repeatable")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Slurm: show and check the script, submit nothing")
    ] = False,
    address: Annotated[str, typer.Option(help="Ray: HOST:PORT of the head, or auto: this host's cluster")] = "auto",
    min_actors: Annotated[int, typer.Option(min=1, help="Ray: actors at any time")] = 1,
    max_actors: Annotated[
        int | None, typer.Option(min=1, help="Ray: actors while the learner hungers; default: --min-actors")
    ] = None,
    place_s: Annotated[float, typer.Option(min=1, help="Ray: seconds in which it must find places")] = 120,
) -> None:
    """Start learner and actors on a cluster: a Slurm job, or processes on a Ray cluster, by the commands by hand."""
    if slurm == ray:
        raise ConfigError("say where: async-rl launch --slurm or async-rl launch --ray")
    from async_rl.launch.job import Job

    job = Job.of(source, overrides or [], out, resume)
    if slurm:
        from async_rl.launch.slurm import run_slurm
        from async_rl.launch.slurm_script import Component, SlurmOptions

        options = SlurmOptions(
            learner=Component(nodes=learner_nodes, partition=partition, gpus=learner_gpus, cpus=learner_cpus),
            actor=Component(
                nodes=actor_nodes, partition=actor_partition or partition, gpus=actor_gpus, cpus=actor_cpus
            ),
            engines=engines,
            time=time,
            account=account,
            port=port,
            trusted_network=trusted_network,
            extra=tuple(sbatch or ()),
        )
        raise typer.Exit(run_slurm(job, options, typer.echo, dry_run=dry_run))
    from async_rl.launch.progress import make_console
    from async_rl.launch.ray_run import RayOptions, run_ray

    if dry_run:
        raise ConfigError("--dry-run shows a batch script: it goes with --slurm")
    ray_options = RayOptions(
        address=address,
        least=min_actors,
        most=max_actors or min_actors,
        learners=learner_nodes,
        learner_gpus=learner_gpus,
        learner_cpus=learner_cpus,
        actor_gpus=actor_gpus,
        actor_cpus=actor_cpus or 1,
        trusted_network=trusted_network,
        place_s=place_s,
    )
    raise typer.Exit(run_ray(job, ray_options, make_console()))
