"""What goes between a fleet and a cluster: a task for a place, and what becomes of the life that begins there.

tasks ─► Task ─► cluster.begin ─► Life ── poll ─► Started, Ended, Lost          stop, remove
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A command that some node is to run."""

    name: str
    command: tuple[str, ...]
    """Behind ``python -m``, of the node's own Python."""
    listens: bool = False
    """Whether the ``HOST:PORT`` where it is to listen, which the node knows, is put behind its last word."""
    port: int = 0
    """The port that it had before, which it gets again if it is free; 0: any."""
    log: Path
    """Of all its lives."""
    work: Path
    """Working directory."""
    needs: tuple[Path, ...]
    """Files that must be there: the file system is shared."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment that Ray gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """It runs."""

    pid: int
    host: str
    address: str
    """``HOST:PORT`` where it will listen; empty if it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """It has ended."""

    exit_code: int
    """Negative for a signal."""
    sentence: str | None
    """What it said itself about why, see :func:`async_rl.launch.children.sentence`."""
    told: str
    """How it ended, in words, with the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A life whose end nobody saw, or that could not begin."""

    told: str
    """What is known of it, in words."""
    hopeless: bool = False
    """It would be the same again."""


Report = Started | Ended | Lost


class Life(Protocol):
    """One life of a command in one place; :class:`async_rl.launch.ray_cluster.RayLife` is the real one."""

    @property
    def is_placed(self) -> bool:
        """Whether it has found its place and runs there."""

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
