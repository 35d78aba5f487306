"""How many sequences and sampled tokens met which fate: shows whether what is lost is longer than what is trained."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import numpy as np

from async_rl.data import Group

Fate = Literal["trained", "filtered", "lost", "generated"]


class Tally:
    """Sums by fate: ``trained`` (once per use), ``filtered``, ``lost`` (late, too old, refused), ``generated``."""

    def __init__(self) -> None:
        self.sequences: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.ages: Counter[int] = Counter()
        """Trained tokens by age, in learner versions."""

    def add(self, group: Group, *fates: Fate) -> None:
        """Count a group's sequences and sampled tokens."""
        num_sampled = int(np.count_nonzero(group.arrays["versions"] >= 0))
        for fate in fates:
            self.sequences[fate] += len(group)
            self.tokens[fate] += num_sampled

    def mean_length(self, fate: Fate) -> float | None:
        """Sampled tokens per sequence; ``None`` before the first."""
        return self.tokens[fate] / self.sequences[fate] if self.sequences[fate] else None

    def to_plain(self) -> dict[str, dict[str, int]]:
        """For a checkpoint."""
        return {
            "sequences": dict(self.sequences),
            "tokens": dict(self.tokens),
            "ages": {str(age): n for age, n in self.ages.items()},
        }

    def update(self, plain: dict[str, Any]) -> None:
        """Add what :meth:`to_plain` gave."""
        self.sequences.update(plain["sequences"])
        self.tokens.update(plain["tokens"])
        self.ages.update({int(age): n for age, n in plain["ages"].items()})
