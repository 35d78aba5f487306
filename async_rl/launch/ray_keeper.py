"""Runs inside a Ray actor on some node: starts one command by hand there, watches it, ends it. Knows nothing of Ray.

    Task ─► start() ─► Started (where it listens)          look() ─► None ... Ended          stop() ─► SIGTERM

The kernel ends the command with the Ray worker in which this runs, so a node that Ray loses leaves no process behind.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys

from async_rl.errors import ConfigError
from async_rl.launch.children import Child
from async_rl.launch.places import Ended, Started, Task
from async_rl.route import joined

_ENDED_LINES = 15


class Keeper:
    """One life of a command.

    Args:
        task: what is run.
        host: address of this node, by which others reach it.
    """

    def __init__(self, task: Task, host: str) -> None:
        self._task, self._host = task, host
        self._child: Child | None = None

    def start(self) -> Started:
        """Start it.

        Raises:
            ConfigError: this node does not see the run's files.
        """
        task = self._task
        for path in (task.work, *task.needs):
            if not path.exists():
                raise ConfigError(
                    f"{path} is not there on node {socket.gethostname()} ({self._host}): run folder and working "
                    "directory must lie on a file system that all nodes share"
                )
        os.chdir(task.work)
        command, address = [sys.executable, "-m", *task.command], ""
        if task.listens:
            address = joined(self._host, _free_port(self._host, task.port))
            command[-1] += address
        self._child = Child.start(task.name, command, task.log, {**os.environ, **task.env})
        return Started(pid=self._child.pid, host=self._host, address=address)

    def look(self, wait_s: float) -> Ended | None:
        """Its end, if that comes within the time.

        Args:
            wait_s: longest wait.
        """
        child = self._child
        assert child is not None
        if child.poll() is None:
            handle = os.pidfd_open(child.pid)
            try:
                select.select([handle], [], [], wait_s)
            finally:
                os.close(handle)
        code = child.poll()
        if code is None:
            return None
        lines = "\n".join(f"  {line}" for line in child.tail(_ENDED_LINES))
        told = f"{child.describe_end()} on {self._host}\nlast lines of {child.log}:\n{lines}"
        return Ended(exit_code=code, sentence=child.sentence(), told=told)

    def stop(self) -> None:
        """Ask it to end, as Ctrl-C would; asked again, it ends at once."""
        if self._child is not None:
            self._child.signal(signal.SIGTERM)


def _free_port(host: str, wish: int) -> int:
    """A port of this host that nobody uses: the wished one if possible."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wish))
        except OSError:  # taken meanwhile, or of another node
            probe.bind((host, 0))
        return int(probe.getsockname()[1])
