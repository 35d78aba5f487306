"""How many sequences and sampled tokens met which fate: shows whether what is lost is longer than what is trained.

In a control run steps of environments are counted in place of tokens, and the last episodes are remembered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from async_rl.buffer.episode_window import EpisodeWindow
from async_rl.data import Group

Fate = Literal["trained", "filtered", "lost", "generated"]


class Tally:
    """Sums by fate: ``trained`` (once per use), ``filtered``, ``lost`` (late, too old, refused), ``generated``."""

    def __init__(self) -> None:
        self.sequences: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        """Sampled tokens, or steps of environments in which an action counted."""
        self.ages: Counter[int] = Counter()
        """Trained tokens (or steps) by age, in learner versions."""
        self.episodes = EpisodeWindow()

    def add(self, group: Group, *fates: Fate) -> None:
        """Count a group's sequences and sampled tokens."""
        for fate in fates:
            self.count(fate, len(group), group.num_sampled)

    def count(self, fate: Fate, sequences: int, tokens: int) -> None:
        """Count sequences and sampled tokens."""
        self.sequences[fate] += sequences
        self.tokens[fate] += tokens

    def untrain(self, sequences: int, tokens: int, ages: Mapping[int, int]) -> None:
        """Take back what was counted as trained."""
        self.sequences["trained"] -= sequences
        self.tokens["trained"] -= tokens
        self.ages -= Counter(ages)

    def untrain_all(self) -> None:
        """Nothing is trained any more."""
        self.sequences["trained"] = self.tokens["trained"] = 0
        self.ages.clear()

    def mean_length(self, fate: Fate) -> float | None:
        """Sampled tokens per sequence; ``None`` before the first."""
        return self.tokens[fate] / self.sequences[fate] if self.sequences[fate] else None

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "sequences": dict(self.sequences),
            "tokens": dict(self.tokens),
            "ages": {str(age): n for age, n in self.ages.items()},
            "episodes": self.episodes.to_plain(),
        }

    def update(self, plain: dict[str, Any]) -> None:
        """Add what :meth:`to_plain` gave."""
        self.sequences.update(plain["sequences"])
        self.tokens.update(plain["tokens"])
        self.ages.update({int(age): n for age, n in plain["ages"].items()})
        self.episodes.restore(plain["episodes"])
