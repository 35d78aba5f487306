"""The batch script of a Slurm job: learner nodes and actor nodes as two components, the commands by hand on each. Pure.

    sbatch ─► script, on the first learner node
                ├─ srun on the learner nodes:       scripts/launch_learner.sh          its exit code is the job's
                ├─ srun on each actor node:         scripts/launch_actor.sh --connect FIRST_LEARNER_NODE:PORT
                └─ srun for each scorer, if any:    the same with --role

Each actor node has a step of its own, so a lost node takes nothing else with it. When every actor step has failed the
learner is asked to stop, as nobody should pay for nodes that wait. Submitted again, the script resumes the run.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.errors import ConfigError
from async_rl.launch.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """What one kind of node is asked for; ``None`` and 0: the partition's own choice."""

    nodes: int
    partition: str | None = None
    gpus: int = 0
    """A node."""
    cpus: int | None = None
    """A node."""

    def directives(self) -> list[str]:
        """Its options of ``sbatch``, one task a node."""
        return [
            *([f"--partition={self.partition}"] if self.partition else []),
            f"--nodes={self.nodes}",
            "--ntasks-per-node=1",
            *([f"--gpus-per-node={self.gpus}"] if self.gpus else []),
            *([f"--cpus-per-task={self.cpus}"] if self.cpus else []),
        ]

    def step(self) -> list[str]:
        """What ``srun`` is told again: it does not take all of it from the job."""
        return [
            *([f"--gpus-per-node={self.gpus}"] if self.gpus else []),
            *([f"--cpus-per-task={self.cpus}"] if self.cpus else []),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """A job's request."""

    learner: Component
    actor: Component
    engines: int | None = None
    """Actor processes a node; ``None``: one for each of its GPUs, and one without."""
    time: str | None = None
    """Limit, as Slurm writes it: ``MINUTES``, ``HH:MM:SS`` or ``DAYS-HH``."""
    account: str | None = None
    port: int | None = None
    """Of the buffer server; ``None``: one that depends on the job's number."""
    warning_s: int = 180
    """So long before the limit the run is asked to stop, so that the learner writes a checkpoint."""
    trusted_network: bool = False
    """Ranks of several learner nodes talk unencrypted."""
    extra: Sequence[str] = ()
    """Further options of ``sbatch``, for both components."""


def slurm_script(job: Job, options: SlurmOptions, scripts: Path, python: str) -> str:
    """The text of the script.

    Args:
        job: the run.
        options: what is asked for.
        scripts: folder of ``launch_learner.sh`` and ``launch_actor.sh``.
        python: interpreter of the installation that runs it.
    """
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *_directives(job, options),
            "",
            *_where(job, options, python),
            "",
            *_learner(job, options, scripts),
            "",
            *_actors(job, options, scripts),
            "",
            _END,
        ]
    )


def _directives(job: Job, options: SlurmOptions) -> list[str]:
    shared = [
        *([f"--account={options.account}"] if options.account else []),
        *([f"--time={options.time}"] if options.time else []),
        f"--signal=TERM@{options.warning_s}",
        "--no-kill",
        *options.extra,
    ]
    head = [
        f"--job-name={job.config.name}",
        f"--chdir={job.work}",
        f"--output={job.files / 'slurm-%j.log'}",
        "--open-mode=append",
    ]
    learner = [*head, *options.learner.directives(), *shared]
    actor = [*options.actor.directives(), *shared]
    return (
        [f"#SBATCH {_directive(d)}" for d in learner] + ["#SBATCH hetjob"] + [f"#SBATCH {_directive(d)}" for d in actor]
    )


def _directive(option: str) -> str:
    """Slurm splits such a line as a shell does, so a value with a blank in it is quoted.

    Raises:
        ConfigError: it is more than one line.
    """
    if "\n" in option:
        raise ConfigError(f"{option!r} cannot stand in a batch script: it has a line break in it")
    return shlex.quote(option)


def _where(job: Job, options: SlurmOptions, python: str) -> list[str]:
    """Nodes, address, run folder."""
    port = str(options.port) if options.port else "$((20000 + SLURM_JOB_ID % 20000))"
    return [
        "set -uo pipefail",
        "learner= workers=",
        "trap 'kill $learner $workers 2>/dev/null || exit 143' TERM INT  # they end in order, and are waited for",
        f"export PYTHON={shlex.quote(python)}",
        f'export PYTHONPATH={shlex.quote(str(job.search))}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        'mapfile -t learners < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0")',
        'mapfile -t actors < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")',
        'if [ "${#learners[@]}" -eq 0 ] || [ "${#actors[@]}" -eq 0 ]; then',
        '  echo "job: Slurm names no nodes: this script is for a heterogeneous job, submit it with sbatch" >&2',
        "  exit 2",
        "fi",
        f'address="${{learners[0]}}:{port}"',
        f"config={shlex.quote(str(job.config_file))} run={shlex.quote(str(job.out))}",
        'place=(--out "$run")',
        'if [ -f "$run/config.toml" ]; then place=(--resume "$run"); fi  # submitted again: from the newest checkpoint',
        'echo "job: learner on ${learners[*]}, actors on ${actors[*]}, server at $address"',
    ]


def _learner(job: Job, options: SlurmOptions, scripts: Path) -> list[str]:
    command = f"bash {shlex.quote(str(scripts / 'launch_learner.sh'))}"
    step = " ".join(["srun", "--het-group=0", "--kill-on-bad-exit=1", *options.learner.step()])
    if options.learner.nodes == 1:
        where = '--bind "0.0.0.0:${address##*:}"'
        return [f'{step} {command} "$config" "${{place[@]}}" {where} &', "learner=$!"]
    trusted = " --trusted-network" if options.trusted_network else ""
    group = f'--nnodes {options.learner.nodes} --node-rank "$SLURM_NODEID" --rendezvous "$address"{trusted}'
    on_node = shlex.quote(f'exec {command} "$@" {group}')  # the rank of a node is known there only
    return [
        "export address",
        f'{step} bash -c {on_node} learner "$config" "${{place[@]}}" &',
        "learner=$!",
    ]


def _actors(job: Job, options: SlurmOptions, scripts: Path) -> list[str]:
    command = f'bash {shlex.quote(str(scripts / "launch_actor.sh"))} "$config" --connect "tcp://$address"'
    one = ["srun", "--het-group=1", "--nodes=1", "--ntasks=1", "--overlap", *options.actor.step()]
    step = " ".join(one) + ' --nodelist="$node"'
    engines = f" --engines {options.engines}" if options.engines else ""
    lines = [
        "look_after() {  # all actor steps; the learner is asked to stop if none of them ended well",
        "  local node steps=() failed=0",
        "  trap 'kill \"${steps[@]}\" 2>/dev/null; wait; exit 0' TERM",
        '  for node in "${actors[@]}"; do',
        f"    {step} {command}{engines} & steps+=($!)",
        "  done",
    ]
    for index, role in enumerate(job.scorers):
        lines += [
            f'  node="${{actors[{index} % ${{#actors[@]}}]}}"',
            f"  {step} {command} --engines 1 --role {role} & steps+=($!)",
        ]
    return [
        *lines,
        '  for step in "${steps[@]}"; do wait "$step" || failed=$((failed + 1)); done',
        '  if [ "$failed" -eq "${#steps[@]}" ]; then',
        '    echo "job: every actor step has failed: the learner is asked to stop" >&2',
        '    kill "$learner" 2>/dev/null',
        "  fi",
        "}",
        "look_after &",
        "workers=$!",
    ]


_END = """\
wait "$learner"
code=$?
while kill -0 "$learner" 2>/dev/null; do wait "$learner"; code=$?; done  # a signal ends the wait, not the learner
kill "$workers" 2>/dev/null  # the run is over: whoever serves it has nothing to do any more
wait "$workers"
echo "job: the learner ended with exit code $code; the run is in $run"
exit "$code"
"""
