"""What it takes to go back to an earlier step: which attempts were trained since, and what they added to the counts.

batches.jsonl ─► undone(rows, step) ─► [Undone] ─┐
train(s) ─► TrainedSteps.add ─► take_back(step) ─┴─► Ledger.rewind         the tally follows both
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.buffer.batch_stats import batch_ages
from async_rl.buffer.records import Entry
from async_rl.buffer.tally import Tally

KEPT_STEPS = 4096
"""Steps that are remembered. A rewind beyond them takes the counts of these back only (to step 0: all), and what is
sampled again then begins at draw 0; the attempts themselves come from batches.jsonl, which has them all."""


@dataclass(frozen=True, slots=True)
class Undone:
    """An attempt whose training, at least one use of it, is void."""

    ordinal: int
    attempt: int
    task_index: int
    uses_before: int
    """Uses in steps that stay."""


def undone(rows: Iterable[Mapping[str, Any]], step: int) -> list[Undone]:
    """Attempts that were trained in steps >= ``step``, in ordinal order.

    Args:
        rows: of ``batches.jsonl``: ``step``, ``ordinals``, ``attempts``, ``task_indices``; a repeated row counts once.
        step: the first step that is void.
    """
    batches = {row["step"]: zip(row["ordinals"], row["attempts"], row["task_indices"], strict=True) for row in rows}
    steps: dict[tuple[int, int, int], list[int]] = {}
    for trained_at, attempts in batches.items():
        for key in attempts:
            steps.setdefault(key, []).append(trained_at)
    return [Undone(*key, sum(s < step for s in uses)) for key, uses in sorted(steps.items()) if max(uses) >= step]


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """What one step added to the counts of what is trained."""

    step: int
    sequences: int
    tokens: int
    ages: Mapping[int, int]
    """Tokens by age."""
    draws: Mapping[int, int]
    """By ordinal, where it is not 0."""


def batch_row(step: int, entries: Sequence[Entry]) -> dict[str, Any]:
    """A row of ``batches.jsonl``."""
    return {
        "step": step,
        "ordinals": [e.ordinal for e in entries],
        "attempts": [e.attempt for e in entries],
        "task_indices": [e.task_index for e in entries],
    }


class TrainedSteps:
    """The newest :data:`KEPT_STEPS` steps."""

    def __init__(self) -> None:
        self._steps: deque[TrainedStep] = deque(maxlen=KEPT_STEPS)

    def add(self, step: int, entries: Sequence[Entry], tally: Tally) -> None:
        """The step after the newest trains ``entries``, which still have their groups; ``tally`` counts them."""
        groups = [e.payload for e in entries]
        sequences, tokens = sum(map(len, groups)), sum(g.num_sampled for g in groups)
        ages = batch_ages(groups, step)
        tally.count("trained", sequences, tokens)
        tally.ages.update(ages)
        draws = {e.ordinal: e.draw for e in entries if e.draw}
        self._steps.append(TrainedStep(step, sequences, tokens, ages, draws))

    def take_back(self, step: int, tally: Tally) -> dict[int, int]:
        """The steps from ``step`` on are void, also in ``tally``; returns the draws of what they trained, if not 0."""
        draws: dict[int, int] = {}
        while self._steps and self._steps[-1].step >= step:
            void = self._steps.pop()
            tally.untrain(void.sequences, void.tokens, void.ages)
            draws.update(void.draws)
        if step == 0:
            tally.untrain_all()
        return draws

    def to_plain(self) -> list[list[Any]]:
        """For a checkpoint."""
        return [[s.step, s.sequences, s.tokens, list(s.ages.items()), list(s.draws.items())] for s in self._steps]

    def restore(self, plain: Iterable[list[Any]]) -> None:
        """Go on from :meth:`to_plain`."""
        for step, sequences, tokens, ages, draws in plain:
            self._steps.append(TrainedStep(step, sequences, tokens, dict(map(tuple, ages)), dict(map(tuple, draws))))
