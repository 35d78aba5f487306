"""``async-rl launch --slurm``: the job's script is written, checked and submitted, or only shown.

job, options ─► slurm_script ─► bash -n ─┬─ --dry-run ─► sbatch --test-only, stdout          nothing is written
                                         └─► DIR/job/job.sbatch ─► sbatch ─► number of the job
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.launch.job import Job
from async_rl.launch.slurm_script import WARNING_S, SlurmOptions, scorer_guests, slurm_script

SBATCH_S = 60.0
"""The controller answers within this time."""
_MINUTES = re.compile(r"(\d+)(?::(\d\d))?")
_HOURS = re.compile(r"(\d+):(\d\d):(\d\d)")
_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d\d))?(?::(\d\d))?")
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
    _ask(["bash", "-n", "/dev/stdin"], text, "bash -n, the check of the script,")
    has_sbatch = shutil.which("sbatch") is not None
    if dry_run:
        say(text)
        if has_sbatch:
            _, told = _ask(["sbatch", "--test-only"], text, "sbatch --test-only")
            say(f"# checked: bash -n, sbatch --test-only: {told.strip()}")
        else:
            say("# checked: bash -n; sbatch was not found on this host, so Slurm itself was not asked")
        return 0
    if not has_sbatch:
        raise ConfigError("there is no sbatch on this host: submit from a login node of the cluster, or use --dry-run")
    job.make()
    job.write()
    script = job.script
    before = script.read_text(encoding="utf-8") if script.exists() else None
    script.write_text(text, encoding="utf-8")
    try:
        out, _ = _ask(["sbatch", "--parsable", str(script)], "", "sbatch")
    except AsyncRLError:  # as it was: a folder with a script is one of a job that was submitted
        script.unlink() if before is None else script.write_text(before, encoding="utf-8")
        raise
    number = out.strip().partition(";")[0]
    again = shlex.join(["sbatch", str(script)])
    say(f"job {number} is submitted; its log: {job.files / f'slurm-{number}.log'}")
    say(f"to stop it with a checkpoint: scancel --signal=TERM {number}; to go on with the run: {again}")
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


def limit_s(time: str) -> int:
    """Seconds of a time limit in one of Slurm's forms: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``.

    Raises:
        ConfigError: it is of another form.
    """
    if match := _DAYS.fullmatch(time):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    elif match := _HOURS.fullmatch(time):
        days, (hours, minutes, seconds) = 0, (int(part) for part in match.groups())
    elif match := _MINUTES.fullmatch(time):
        days, hours, (minutes, seconds) = 0, 0, (int(part or 0) for part in match.groups())
    else:
        raise ConfigError(f"--time {time!r}: write it as MINUTES, HH:MM:SS or DAYS-HH")
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _check(job: Job, options: SlurmOptions) -> None:
    """Refuse what Slurm, the learner or the actors would refuse later."""
    if options.time is not None and limit_s(options.time) <= 2 * WARNING_S:
        raise ConfigError(
            f"--time {options.time!r}: {WARNING_S} s before the limit the run is asked to stop, so ask for more than "
            f"{2 * WARNING_S // 60} minutes"
        )
    if options.port is not None and options.port not in _PORTS:
        raise ConfigError(f"--port {options.port}: choose one from {_PORTS.start} to {_PORTS.stop - 1}")
    named = {"--partition": options.learner.partition, "--actor-partition": options.actor.partition}
    for option, value in {**named, "--account": options.account}.items():
        if value is not None and not value.strip():
            raise ConfigError(f"{option} {value!r} is empty: name one, or leave the option away")
    for option in options.extra:
        if not option.startswith("-"):
            raise ConfigError(f"--sbatch {option!r} is no option of sbatch: write it as in --sbatch=--qos=high")
    nodes = options.learner.nodes
    if job.config.weights.path == "broadcast" and (nodes == 1 or not job.config.weights.trusted_network):
        raise ConfigError(
            "weights.path = 'broadcast' in a Slurm job needs --set weights.trusted_network=true and several learner "
            "nodes: with one the server listens on all addresses of its node, and engines must meet at one; set "
            "weights.path = 'auto'"
        )
    job.check_learner_gpus(nodes, options.learner.gpus)
    guests, gpus = scorer_guests(job, options), options.actor.gpus
    if gpus and guests + (options.engines or 1) > gpus:
        raise ConfigError(
            f"an actor node has {gpus} GPUs, but {options.engines or 1} engines and {guests} scorers want one "
            "each: ask for more GPUs or more actor nodes, or for fewer engines or scorers"
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
