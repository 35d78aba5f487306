"""The commands by hand of one run, as tasks for nodes. Pure but for one look whether the run has begun before."""

from __future__ import annotations

import os

from async_rl.launch.by_hand import actor_words, learner_words
from async_rl.launch.job import Job
from async_rl.launch.places import Task
from async_rl.route import parted


class RayTasks:
    """Makes the commands of a job.

    Args:
        job: prepared, on a file system that all nodes share.
        learners: learner hosts.
        path: ``PYTHONPATH`` of the command that launches.
    """

    def __init__(self, job: Job, learners: int, path: str) -> None:
        self._job, self._learners = job, learners
        self._env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(job.search), path]))}

    def learner(self, index: int, address: str) -> Task:
        """``async-rl learner`` on learner host ``index``; a run that has begun before goes on.

        Args:
            index: 0: the first, where the buffer server is.
            address: ``HOST:PORT`` where that one listens or listened before; empty before its first life.
        """
        job, is_first = self._job, index == 0
        begin = [str(job.config_file), "--resume" if job.has_begun else "--out", str(job.out)]
        words = learner_words(begin, "" if is_first else address, self._learners, str(index))
        port = parted(address)[1] if is_first and address else 0
        return self._task("learner" if is_first else f"learner{index}", ["learner", *words], is_first, port)

    def worker(self, name: str, role: str, address: str) -> Task:
        """``async-rl actor`` for an actor or a scorer.

        Args:
            name: unique in the run.
            role: ``actor``, ``reward`` or ``reference``.
            address: ``HOST:PORT`` of the server.
        """
        return self._task(name, ["actor", *actor_words(str(self._job.config_file), address, role, name=name)])

    def _task(self, name: str, words: list[str], listens: bool = False, port: int = 0) -> Task:
        return Task(
            name=name,
            command=("async_rl", *words),
            listens=listens,
            port=port,
            log=self._job.files / f"{name}.log",
            work=self._job.work,
            needs=(self._job.config_file,),
            env=self._env,
        )
