"""What an actor holds for a ticket, and what becomes of it.

    Ticket ─► Work ─► player (actors.players.answers or actors.players.episodes) ─► Played │ Failed

The evaluator's jobs have no ticket; they are played in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from actors.engines.base import Completion
from actors.players.transcript import Transcript
from async_rl.protocol import Ticket
from async_rl.tasks import Problem

Source = Literal["prompt", "verifier", "environment"]
_SLUGS = {"prompt": "prompt", "verifier": "verifier", "environment": "env"}


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One problem to be answered ``size`` times."""

    id: int
    """Unique among the jobs that are being generated; the ordinal of a ticket."""
    problem: Problem
    size: int
    seed: tuple[int, ...]
    """Identifies the random streams: (run seed, ordinal, draw)."""
    draw: int = 0
    """How often it failed by its content before, see :attr:`async_rl.protocol.Ticket.draw`."""
    transcripts: list[Transcript] = field(default_factory=list)
    """One per sample, from the moment at which the prompt is known."""
    prompt: str = ""
    """For people: the first text that the model reads."""
    generated: bool = False
    """Whether nothing is left for the engine to do."""


@dataclass(slots=True, eq=False, kw_only=True)
class Work(Job):
    """The job of a ticket while this actor holds it."""

    ticket: Ticket
    since: float
    """``time.monotonic()`` at which the ticket came."""


@dataclass(frozen=True, slots=True)
class Played:
    """A job whose answers are all there, with their rewards (NaN: a scorer gives them)."""

    job: Job
    rewards: Sequence[float]


@dataclass(frozen=True, slots=True)
class Failed:
    """A job that cannot be finished."""

    job: Job
    source: Source
    """Who failed: the prompt does not fit the model, the verifier, the environment."""
    outcome: str
    detail: str
    final: bool
    """Whether another attempt would end the same way."""

    @property
    def reason(self) -> str:
        """The slug that is counted."""
        return f"{_SLUGS[self.source]}_{self.outcome}"


Result = Played | Failed


class Player(Protocol):
    """Turns jobs into results, with an engine that its caller steps. Nothing here blocks."""

    refused: int
    """Prompts in a row that the engine has refused."""

    def begin(self, job: Job) -> None:
        """Start a job."""

    def take(self, completions: Sequence[Completion]) -> None:
        """Hand over what the engine has finished."""

    def poll(self) -> list[Result]:
        """Results that are there by now; must be called after ``begin`` and ``take``."""

    def drop(self, job: Job) -> None:
        """Forget a job that is still being generated."""

    @property
    def unfinished(self) -> int:
        """Samples for which the engine has not ended its work."""

    @property
    def busy(self) -> bool:
        """Whether a verifier or an environment works."""

    def filenos(self) -> list[int]:
        """Descriptors that become readable when ``poll`` has something to do."""

    @property
    def next_deadline(self) -> float | None:
        """``time.monotonic()`` at which ``poll`` must be called at the latest."""

    def close(self) -> None:
        """End all child processes."""
