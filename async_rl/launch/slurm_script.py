"""The batch script of a Slurm job: learner nodes and actor nodes as two components, the commands by hand on each. Pure.

    sbatch ─► script, on the first learner node
                ├─ srun on the learner nodes:       scripts/launch_learner.sh          its exit code is the job's
                ├─ srun on each actor node:         scripts/launch_actor.sh --connect FIRST_LEARNER_NODE:PORT
                └─ srun for each scorer, if any:    the same with --role

Each actor node has a step of its own, so a lost node takes nothing else with it. When every actor step has failed the
learner is asked to stop, as nobody should pay for nodes that wait. Submitted again, the script resumes the run.

Whoever is to end in order is told by ``scancel --signal``: an ``srun`` that gets SIGTERM itself kills its tasks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.errors import ConfigError
from async_rl.launch.by_hand import actor_words, learner_words
from async_rl.launch.job import Job

WARNING_S = 180
"""So long before the time limit the run is asked to stop, so that the learner writes a checkpoint."""
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """What one kind of node is asked for."""

    nodes: int
    partition: str | None = None
    """``None``: the cluster's own choice."""
    gpus: int = 0
    """A node."""
    cpus: int | None = None
    """A node; ``None``: what Slurm gives with so many GPUs."""

    def directives(self) -> list[str]:
        """Its options of ``sbatch``, one task a node."""
        partition = [f"--partition={self.partition}"] if self.partition else []
        return [*partition, f"--nodes={self.nodes}", "--ntasks-per-node=1", *self.step()]

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
    """Actor processes a node; ``None``: one for each of its GPUs that no scorer has, and one without."""
    time: str | None = None
    """Limit, as Slurm writes it."""
    account: str | None = None
    port: int | None = None
    """Of the buffer server; ``None``: one that depends on the job's number."""
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
            *_learner(options, scripts),
            "",
            *_actors(job, options, scripts),
            "",
            _END,
        ]
    )


def scorer_guests(job: Job, options: SlurmOptions) -> int:
    """Most scorers on one actor node that want a GPU of it; 0 without GPUs."""
    wanting = sum(job.computes(role) for role in job.scorers) if options.actor.gpus else 0
    return -(-wanting // options.actor.nodes)


def directive(option: str) -> str:
    r"""An option as it stands behind ``#SBATCH``, where ``"`` and ``\`` alone mean the same to every version of Slurm.

    Raises:
        ConfigError: it is more than one line.
    """
    if "\n" in option or "\r" in option:
        raise ConfigError(f"{option!r} cannot stand in a batch script: it has a line break in it")
    if _PLAIN.fullmatch(option):
        return option
    return '"' + re.sub(r'(["\\#])', r"\\\1", option) + '"'


def _directives(job: Job, options: SlurmOptions) -> list[str]:
    shared = [
        *([f"--account={options.account}"] if options.account else []),
        *([f"--time={options.time}"] if options.time else []),
        f"--signal=TERM@{WARNING_S}",
        "--no-kill",
        *options.extra,
    ]
    log = str(job.files).replace("%", "%%")  # Slurm's own patterns begin with it
    head = [
        f"--job-name={job.config.name}",
        f"--chdir={job.work}",
        f"--output={log}/slurm-%j.log",
        "--open-mode=append",
    ]
    learner = [*head, *options.learner.directives(), *shared]
    actor = [*options.actor.directives(), *shared]
    return [f"#SBATCH {line}" for line in [*map(directive, learner), "hetjob", *map(directive, actor)]]


def _where(job: Job, options: SlurmOptions, python: str) -> list[str]:
    """Nodes, address, run folder. The port is below those that the system gives to outgoing connections."""
    port = str(options.port) if options.port else "$((10000 + SLURM_JOB_ID % 20000))"
    return [
        "set -uo pipefail",
        "trap 'scancel --signal=TERM \"$SLURM_JOB_ID\"' TERM INT  # the steps end in order, and are waited for",
        f"export PYTHON={shlex.quote(python)}",
        f'export PYTHONPATH={shlex.quote(str(job.search))}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        'mapfile -t learners < <(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-}")',
        'mapfile -t actors < <(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_1:-}")',
        'if [ "${#learners[@]}" -eq 0 ] || [ "${#actors[@]}" -eq 0 ]; then',
        '  echo "job: Slurm names no nodes: this script is for a heterogeneous job, submit it with sbatch" >&2',
        "  exit 2",
        "fi",
        f'export port={port} address="${{learners[0]}}"',
        "address+=:$port",
        f"export config={shlex.quote(str(job.config_file))} run={shlex.quote(str(job.out))} begin=--out",
        'if [ -f "$run/config.toml" ]; then begin=--resume; fi  # submitted again: from the newest checkpoint',
        'echo "job: learner on ${learners[*]}, actors on ${actors[*]}, server at $address"',
        "",
        "# Every step looks first whether its node sees the run folder.",
        'look=\'[ -f "$config" ] || {',
        '  echo "job: $config is not there on node $(hostname): the run folder must lie on a file system that all '
        'nodes share" >&2',
        "  exit 1",
        "}'",
    ]


def _step(options: Sequence[str], script: Path, words: Sequence[str], first: str = "") -> str:
    """One ``srun`` in the background; its words are made of what the script exports, on the node itself."""
    command = f"{first}exec bash {shlex.quote(str(script))} {' '.join(words)}"
    return f'{" ".join(["srun", *options])} bash -c "$look; "{shlex.quote(command)} &'


def _learner(options: SlurmOptions, scripts: Path) -> list[str]:
    nodes = options.learner.nodes
    step = ["--het-group=0", f"--nodes={nodes}", f"--ntasks={nodes}", "--kill-on-bad-exit=1", *options.learner.step()]
    # with one node it listens on all its addresses: its name may be another one's in its own eyes (127.0.1.1)
    address = '"0.0.0.0:$port"' if nodes == 1 else '"$address"'
    words = learner_words(['"$config"', '"$begin"', '"$run"'], address, nodes, '"$SLURM_NODEID"')
    return [_step(step, scripts / "launch_learner.sh", words), "learner=$!"]


def _actors(job: Job, options: SlurmOptions, scripts: Path) -> list[str]:
    step = ["--het-group=1", "--nodes=1", "--ntasks=1", "--overlap", *options.actor.step(), '--nodelist="$node"']
    script, nodes = scripts / "launch_actor.sh", options.actor.nodes
    wanting = [role for role in job.scorers if options.actor.gpus and job.computes(role)]
    engines = '"$engines"' if options.engines or wanting else None
    actor = _step(step, script, actor_words('"$config"', '"$address"', engines=engines))
    lines = [
        "look_after() {  # all actor steps; the learner is asked to stop if all of them failed",
        "  local i node step steps=() failed=0",
        '  for i in "${!actors[@]}"; do',
        '    node="${actors[i]}"',
        *([f"    export engines={options.engines}"] if options.engines else []),
        *(
            [f"    export engines=$(({options.actor.gpus} - ({len(wanting)} + {nodes - 1} - i) / {nodes}))"]
            if wanting and not options.engines
            else []
        ),
        f"    {actor} steps+=($!)",
        "  done",
    ]
    guests = 0
    for index, role in enumerate(job.scorers):
        first, place = "", index
        if role in wanting:  # the last devices of a node are its scorers'
            first, place = _device(guests // nodes), guests
            guests += 1
        words = actor_words('"$config"', '"$address"', role, engines="1")
        lines += [f'  node="${{actors[{place % nodes}]}}"', f"  {_step(step, script, words, first)} steps+=($!)"]
    return [
        *lines,
        '  for step in "${steps[@]}"; do',
        '    wait "$step"',
        "    case $? in 0 | 143) ;; *) failed=$((failed + 1)) ;; esac  # 143: was asked to end, as the learner was",
        "  done",
        '  if [ "$failed" -eq "${#steps[@]}" ]; then',
        '    echo "job: every actor step has failed: the learner is asked to stop" >&2',
        '    scancel --signal=TERM "$SLURM_JOB_ID"',
        "  fi",
        "}",
        "look_after &",
        "workers=$!",
    ]


def _device(from_end: int) -> str:
    """What makes one device of a node the only one that a command sees, counted from the last."""
    return (
        'IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"; '
        f'export CUDA_VISIBLE_DEVICES="${{gpus[${{#gpus[@]}} - {from_end + 1}]}}"; '
    )


_END = """\
wait "$learner"
code=$?
while kill -0 "$learner" 2>/dev/null; do wait "$learner"; code=$?; done  # a signal ends the wait, not the learner
for _ in {1..15}; do  # actors have heard that the run is over; who has not is told, or Slurm ends it with the job
  kill -0 "$workers" 2>/dev/null || break
  scancel --signal=TERM "$SLURM_JOB_ID_HET_GROUP_1"
  sleep 2 & timer=$!
  wait -n
  kill "$timer" 2>/dev/null
done
echo "job: the learner ended with exit code $code; the run is in $run"
exit "$code"
"""
