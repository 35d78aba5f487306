"""``async-rl launch --slurm``: the job's script is written, checked and submitted, or only shown.

job, options ─► slurm_script ─► bash -n ─┬─ --dry-run ─► sbatch --test-only, stdout          nothing is written
                                         └─► DIR/job/job.sbatch ─► sbatch ─► number of the job
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.launch.job import Job
from async_rl.launch.slurm_script import SlurmOptions, slurm_script

SBATCH_S = 60.0
"""The controller answers within this time."""
_TIME = r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}"
_PORTS = range(1024, 65_536)


def run_slurm(job: Job, options: SlurmOptions, say: Callable[[str], object], *, dry_run: bool) -> int:
    """Submit a job, or show what would be submitted; the exit code.

    Args:
        job: the run; written here.
        options: what is asked for.
        say: told what is to be read.
        dry_run: write and submit nothing.

    Raises:
        ConfigError: an option is wrong, or there is no Slurm here.
        AsyncRLError: Slurm refuses the job, or does not answer.
    """
    _check(job, options)
    scripts = launch_scripts()
    text = slurm_script(job, options, scripts, sys.executable)
    _ask(["bash", "-n", "/dev/stdin"], text, "the script")
    if dry_run:
        say(text)
        if shutil.which("sbatch") is None:
            say("# checked: bash -n (no sbatch here, so Slurm was not asked)")
        else:
            _, told = _ask(["sbatch", "--test-only"], text, "sbatch --test-only")
            say(f"# checked: bash -n, sbatch --test-only: {told.strip()}")
        return 0
    if shutil.which("sbatch") is None:
        raise ConfigError("there is no sbatch on this host: submit from a login node of the cluster, or use --dry-run")
    job.write()
    script = job.files / "job.sbatch"
    script.write_text(text, encoding="utf-8")
    out, _ = _ask(["sbatch", "--parsable", str(script)], "", "sbatch")
    number = out.strip().partition(";")[0]
    say(f"job {number} is submitted; its log: {job.files / f'slurm-{number}.log'}")
    say(f"to stop it with a checkpoint: scancel --signal=TERM {number}; to go on with the run: sbatch {script}")
    return 0


def launch_scripts() -> Path:
    """Folder of ``launch_learner.sh`` and ``launch_actor.sh``, beside the package.

    Raises:
        ConfigError: this installation has none.
    """
    folder = Path(__file__).parents[2] / "scripts"
    for name in ("launch_learner.sh", "launch_actor.sh"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder / name} is missing: the nodes start the commands of a checkout of the repository, so install "
                "the package from one (pip install -e .) on a file system that they share"
            )
    return folder


def _check(job: Job, options: SlurmOptions) -> None:
    """Refuse what Slurm or the learner would refuse later."""
    if options.time is not None and not re.fullmatch(_TIME, options.time):
        raise ConfigError(f"--time {options.time!r}: write it as MINUTES, HH:MM:SS or DAYS-HH")
    if options.port is not None and options.port not in _PORTS:
        raise ConfigError(f"--port {options.port}: choose one from {_PORTS.start} to {_PORTS.stop - 1}")
    ranks, nodes = job.config.learner.ranks, options.learner.nodes
    if ranks % nodes:
        raise ConfigError(f"learner.ranks = {ranks} cannot be split over {nodes} nodes: choose a multiple of them")
    if options.learner.gpus and ranks > nodes * options.learner.gpus:
        raise ConfigError(
            f"learner.ranks = {ranks} on {nodes} nodes with {options.learner.gpus} GPUs each: ask for more GPUs, or "
            "lower learner.ranks"
        )
    if nodes > 1 and not options.trusted_network:
        raise ConfigError(
            f"{nodes} learner nodes: gloo and NCCL do not encrypt what ranks tell each other; say --trusted-network if "
            "only you and your cluster can read that network"
        )


def _ask(command: Sequence[str], text: str, what: str) -> tuple[str, str]:
    """Standard output and error of a command that reads ``text``.

    Raises:
        AsyncRLError: it fails, or does not answer in time.
    """
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=SBATCH_S, check=False)
    except subprocess.TimeoutExpired:
        raise AsyncRLError(f"{what} did not answer within {SBATCH_S:.0f} s: is the controller up (sinfo)?") from None
    if done.returncode:
        raise AsyncRLError(f"{what} refuses: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout, done.stderr
