"""What Slurm and Ray start from: a run folder that all nodes see, with configuration and keys, and commands by hand.

arguments ─► Job ─► write() ─► DIR/job/config.toml, DIR/job/keys/      learner(), actor(): arguments of async-rl
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.config import AnyConfig, Config, load_any, to_toml
from async_rl.curve import make_keys
from async_rl.errors import ConfigError
from async_rl.launch.preflight import prepare_out
from async_rl.runfolder import write_atomically

FOLDER = "job"
"""Folder of a job's own files in the run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run that somebody else starts; nothing is written before :meth:`write`."""

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
            ConfigError: an argument or a setting is wrong, or cannot be on several hosts.
        """
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
    def scorers(self) -> list[str]:
        """Role of each scorer that the run needs, such as ``["reward", "reward", "reference"]``."""
        if not isinstance(self.config, Config):
            return []
        counts = {"reward": self.config.reward.scorers, "reference": self.config.reference.scorers}
        return [stage for stage in self.config.stages for _ in range(counts[stage])]

    def write(self) -> None:
        """Make the folder, its keys and its configuration; keys that are there stay.

        Raises:
            ConfigError: the folder holds a run that is not resumed, or it cannot be written.
        """
        if not self.resumes:
            prepare_out(self.out)
        make_keys(self.files / "keys")
        try:
            write_atomically(self.config_file, to_toml(self.config))
        except OSError as error:
            raise ConfigError(f"{self.config_file} cannot be written: {error.strerror}") from None

    def learner(self, *, resumed: bool = False) -> list[str]:
        """Arguments of ``async-rl learner``, without those that say where it listens.

        Args:
            resumed: the run has begun before, and goes on from its newest checkpoint.
        """
        place = ["--resume", str(self.out)] if resumed else ["--out", str(self.out)]
        return [str(self.config_file), *place]

    def actor(self, role: str = "actor") -> list[str]:
        """Arguments of ``async-rl actor``, without those that say whom it serves.

        Args:
            role: ``actor``, ``reward`` or ``reference``.
        """
        return [str(self.config_file), *(() if role == "actor" else ("--role", role))]

    def _check(self) -> None:
        if self.config.actors.colocated:
            raise ConfigError(
                "actors.placement = 'colocated': actors and learner take turns on one device, which are no several "
                "hosts; set it to 'separate', or use async-rl run on that machine"
            )
