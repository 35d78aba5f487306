"""What a fleet needs from a cluster: a place for a task, and what becomes of the life that begins there.

tasks ─► Task ─► cluster.begin ─► Life ── poll ─► Started, Ended, Lost          stop, remove
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from async_rl.launch.ray_keeper import Ended, Started, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A life whose end nobody saw, or that could not begin."""

    why: str
    hopeless: bool
    """It would be the same again."""


Report = Started | Ended | Lost


class Life(Protocol):
    """One life of a command in one place; :class:`async_rl.launch.ray_cluster.RayLife` is the real one."""

    @property
    def is_placed(self) -> bool:
        """Whether it has found its place."""

    def poll(self) -> Report | None:
        """What has happened since the last call; never waits."""

    def stop(self) -> None:
        """Ask the command to end."""

    def remove(self) -> None:
        """End it by force and free its place."""


class Cluster(Protocol):
    """Where commands find a place."""

    def begin(self, task: Task, resources: Mapping[str, float]) -> Life:
        """Ask for a place; the task starts there by itself."""

    def room(self) -> str:
        """What is free, in words."""


class Tasks(Protocol):
    """The commands by hand of one run; :class:`async_rl.launch.ray_tasks.RayTasks`."""

    def learner(self, index: int, address: str) -> Task:
        """Of learner host ``index``; ``address``: where the first one listens, or listened before."""

    def worker(self, name: str, role: str, address: str) -> Task:
        """Of an actor or scorer that serves ``address``."""
