"""What Slurm and Ray start from: a run folder that all nodes see, with the configuration and keys of all commands.

arguments ─► Job ─► make(), write() ─► DIR/job/keys/, DIR/job/config.toml
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.config import AnyConfig, Config, load_any, to_toml
from async_rl.curve import make_keys
from async_rl.errors import ConfigError
from async_rl.launch.preflight import check_engine, check_out, check_verifier, child_environment, prepare_out
from async_rl.models import SHORT_NAMES, resolve_model
from async_rl.runfolder import write_atomically

FOLDER = "job"
"""Folder of a job's own files in the run folder."""
_OWN = {
    "actors.count": "the number of actors is that of nodes and engines (Slurm), or --min-actors and --max-actors (Ray)",
    "buffer.bind": "the server listens on the learner node that the cluster gives",
    "buffer.insecure": "the server has keys, made for this run",
    "buffer.keys": "the keys are made for this run, in the run folder",
}
"""Settings that would have no effect, and what decides instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run that somebody else starts; nothing is written before :meth:`make`."""

    config: AnyConfig
    out: Path
    """Run folder, absolute; on a file system that all nodes share."""
    work: Path
    """Working directory of all commands: paths in the configuration are read relative to it."""
    search: Path
    """Folder of the configuration's source, where the user's verifier may lie."""
    resumes: bool
    """Whether it continues a run that was launched before."""

    @classmethod
    def of(cls, source: str | None, overrides: Sequence[str], out: Path | None, resume: Path | None) -> Job:
        """A job from the arguments of the command line.

        Args:
            source: preset or configuration file; not needed with ``resume``.
            overrides: ``KEY=VALUE``.
            out: run folder, new or empty; ``None``: ``runs/NAME-TIME``.
            resume: run folder of a job to continue.

        Raises:
            ConfigError: an argument or a setting is wrong, or cannot be on several hosts; a file is not there.
        """
        for key in (override.partition("=")[0].strip() for override in overrides):
            if key in _OWN:
                raise ConfigError(f"--set {key} has no effect with async-rl launch: {_OWN[key]}; leave it away")
        given = source
        if resume is not None:
            if out is not None and out.resolve() != resume.resolve():
                raise ConfigError("--resume continues in the run's own folder; leave --out away")
            before = resume / FOLDER / "config.toml"
            if not before.is_file():
                raise ConfigError(f"--resume {resume}: async-rl launch has prepared no run there ({before} is missing)")
            given = source or str(before)
        if given is None:
            raise ConfigError("name a preset or a CONFIG.toml (async-rl presets lists what ships), or use --resume DIR")
        search = Path(source).resolve().parent if source and source.endswith(".toml") else Path.cwd()
        config = load_any(given, overrides)
        place = resume or out or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        keys = json.dumps(str(place.resolve() / FOLDER / "keys"))
        job = cls(
            config=load_any(given, [*overrides, f"buffer.keys={keys}"]),
            out=place.resolve(),
            work=Path.cwd(),
            search=search,
            resumes=resume is not None,
        )
        job._check()
        return job

    @property
    def files(self) -> Path:
        """Folder of the job's own files."""
        return self.out / FOLDER

    @property
    def config_file(self) -> Path:
        """The configuration from which every process is started."""
        return self.files / "config.toml"

    @property
    def script(self) -> Path:
        """Of a Slurm job, once it is submitted."""
        return self.files / "job.sbatch"

    @property
    def has_begun(self) -> bool:
        """Whether a learner has begun there, so that another one goes on from its newest checkpoint."""
        return (self.out / "config.toml").is_file()

    @property
    def scorers(self) -> list[str]:
        """Role of each scorer that the run needs, such as ``["reward", "reward", "reference"]``."""
        if not isinstance(self.config, Config):
            return []
        counts = {"reward": self.config.reward.scorers, "reference": self.config.reference.scorers}
        return [stage for stage in self.config.stages for _ in range(counts[stage])]

    def computes(self, role: str) -> bool:
        """Whether a scorer of this role runs a model, for which it wants a device of its own where there are any."""
        config = self.config
        return (
            isinstance(config, Config) and config.device != "cpu" and (role == "reference" or config.reward.model != 0)
        )

    def check_learners(self, hosts: int, *, trusted: bool) -> None:
        """Check that the learner group can be spread over so many hosts.

        Args:
            hosts: learner hosts.
            trusted: somebody vouches for the network between them.

        Raises:
            ConfigError: ranks cannot be split evenly, or nobody does.
        """
        ranks = self.config.learner.ranks
        if ranks % hosts:
            raise ConfigError(
                f"learner.ranks = {ranks} cannot be split over {hosts} learner nodes: choose a multiple of them"
            )
        if hosts > 1 and not trusted:
            raise ConfigError(
                f"{hosts} learner nodes: gloo and NCCL do not encrypt what ranks tell each other; say "
                "--trusted-network if only you and your cluster can read that network"
            )
        if hosts == 1 and trusted:
            raise ConfigError("--trusted-network has no effect with one learner node; leave it away")

    def check_learner_gpus(self, hosts: int, gpus: int) -> None:
        """Check that each rank has a device, and that none is paid for and not used.

        Args:
            hosts: learner hosts.
            gpus: of each; 0: all compute on the CPU.

        Raises:
            ConfigError: there are too few, or more than ranks and evaluation use.
        """
        ranks = self.config.learner.ranks
        asked = f"learner.ranks = {ranks} on {hosts} {'node' if hosts == 1 else 'nodes'} with {gpus} GPUs each"
        if gpus and ranks > hosts * gpus:
            raise ConfigError(f"{asked}: ask for more GPUs, or lower learner.ranks")
        if gpus > ranks // hosts + 1:  # the evaluation takes one that no rank has
            raise ConfigError(
                f"{asked}: a rank uses one, the others would do nothing; raise learner.ranks, or ask for fewer GPUs"
            )

    def learner_cpus(self, hosts: int) -> int:
        """CPUs of a learner host without a wish: one a rank, and one for server and evaluation."""
        return self.config.learner.ranks // hosts + 1

    def make(self) -> None:
        """Make the folder and its keys; keys that are there stay.

        Raises:
            ConfigError: the folder holds a run that is not resumed, or it cannot be written.
        """
        if not self.resumes:
            prepare_out(self.out)
        make_keys(self.files / "keys")

    def write(self) -> None:
        """Write the configuration into the folder.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            write_atomically(self.config_file, to_toml(self.config))
        except OSError as error:
            raise ConfigError(f"{self.config_file} cannot be written: {error.strerror}") from None

    def _check(self) -> None:
        if self.config.actors.colocated:
            raise ConfigError(
                "actors.placement = 'colocated': actors and learner take turns on one device, which are no several "
                "hosts; set it to 'separate', or use async-rl run on that machine"
            )
        if not self.resumes:
            check_out(self.out)
            if self.script.exists():
                raise ConfigError(
                    f"{self.out}: a Slurm job was submitted for this run folder already, and would read what this "
                    f"command writes; choose another --out, or go on with --resume {self.out}"
                )
        elif self.has_begun and self.config.contract_hash() != load_any(str(self.out / "config.toml")).contract_hash():
            raise ConfigError(
                f"--resume {self.out}: model, task, sampling, rewards (environment, networks) and seed must stay "
                f"as in {self.out / 'config.toml'}"
            )
        if isinstance(self.config, Config):
            self._check_files(self.config)

    def _check_files(self, config: Config) -> None:
        """What can be seen from here: it would be missed only when the cluster has given its nodes."""
        models = {"model.path": config.model.path}
        models |= {"reference.path": config.reference.path} if config.needs_reference else {}
        models |= {"reward.model_path": config.reward.model_path} if config.reward.model else {}
        for setting, path in models.items():
            if path and path not in SHORT_NAMES:
                resolve_model(path, setting)
        if config.task.data and not Path(config.task.data).exists():
            raise ConfigError(
                f"task.data = {config.task.data!r}: there is nothing in {self.work}; nodes work in the directory from "
                "which the run is launched"
            )
        check_engine(config)
        check_verifier(config.task, child_environment(os.environ, self.search))
