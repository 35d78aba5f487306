"""What a simulation predicts: utilisation of both sides, ages, tokens a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_rl.buffer.batch_stats import describe_ages


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Over whole steps, from one delivery to a later one, the start excluded."""

    learner: float
    """Share of the time in which the learner trains or publishes."""
    actors: float
    """Share of the time of all slots in which they generate."""
    actors_awake: float
    """Share of the time of all actors in which any slot of theirs generates."""
    tokens_per_s: float
    """Trained."""
    step_s: float
    """From one delivery to the next."""
    ages: Mapping[int, int]
    """Trained tokens by age, in versions."""
    lost: float
    """Share of the attempts that ended without being trained: filtered, too old, taken back."""
    books: Mapping[str, int]
    """At the end."""
    steps: int
    """That were looked at."""

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "learner": round(self.learner, 4),
            "actors": round(self.actors, 4),
            "actors_awake": round(self.actors_awake, 4),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "step_s": round(self.step_s, 6),
            "age": describe_ages(self.ages),
            "lost": round(self.lost, 4),
            "books": dict(self.books),
            "steps": self.steps,
        }
