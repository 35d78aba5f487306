"""The commands by hand of one run, as tasks for nodes. Pure but for one look whether the run has begun before."""

from __future__ import annotations

import os
from pathlib import Path

from async_rl.launch.job import Job
from async_rl.launch.ray_keeper import Task


class RayTasks:
    """Makes the commands of a job.

    Args:
        job: prepared, on a file system that all nodes share.
        learners: learner hosts.
        trusted_network: ranks of several learner hosts talk unencrypted.
        path: ``PYTHONPATH`` of the command that launches.
    """

    def __init__(self, job: Job, learners: int, *, trusted_network: bool, path: str) -> None:
        self._job, self._learners, self._trusted = job, learners, trusted_network
        self._env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(job.search), path]))}

    def learner(self, index: int, address: str) -> Task:
        """``async-rl learner`` on learner host ``index``; one that has begun before goes on.

        Args:
            index: 0: the first, where the buffer server is.
            address: ``HOST:PORT`` where that one listens or listened before; empty before its first life.
        """
        command = ["async_rl", "learner", *self._job.learner(resumed=(self._job.out / "config.toml").is_file())]
        serves = "--set=buffer.bind=tcp://"
        if self._learners > 1:
            command += ["--nnodes", str(self._learners), "--node-rank", str(index)]
            command += ["--trusted-network"] if self._trusted else []
            serves = "--rendezvous="
        if index:
            return self._task(f"learner{index}", [*command, f"{serves}{address}"])
        return self._task("learner", command, serves, int(address.rpartition(":")[2] or 0))

    def worker(self, name: str, role: str, address: str) -> Task:
        """``async-rl actor`` for an actor or a scorer.

        Args:
            name: unique in the run.
            role: ``actor``, ``reward`` or ``reference``.
            address: ``HOST:PORT`` of the server.
        """
        arguments = ["--connect", f"tcp://{address}", "--name", name]
        return self._task(name, ["async_rl", "actor", *self._job.actor(role), *arguments])

    def _task(self, name: str, command: list[str], serves: str = "", port: int = 0) -> Task:
        return Task(
            name=name,
            command=tuple(command),
            serves=serves,
            port=port,
            log=Path(self._job.files / f"{name}.log"),
            work=self._job.work,
            needs=(self._job.config_file,),
            env=self._env,
        )
