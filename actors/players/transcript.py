"""One trajectory while it grows: the prompt, what was sampled, and what an environment said in between.

prompt · sampled · observation · sampled · ...          sampled tokens stay as they are: nothing is tokenised twice
mask 0      1           0            1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.engines.base import Completion
from async_rl.data import Array


@dataclass(slots=True)
class Transcript:
    """``turns[i]`` was sampled after ``observations[i - 1]``, and ``turns[0]`` after the prompt."""

    prompt: tuple[int, ...]
    """Token ids [num_prompt]."""
    turns: list[Completion] = field(default_factory=list)
    """What was sampled, stop tokens included."""
    observations: list[tuple[int, ...]] = field(default_factory=list)
    """Token ids between two turns; the observation after the last turn is not kept."""
    texts: list[str] = field(default_factory=list)
    """For people: each turn and each observation in order."""
    reward: float = 0.0
    """Sum of the environment's rewards so far."""
    end: str = ""
    """Why an episode ended: ``done``, ``turns``, ``cut`` or ``context``, see ``actors.players.episodes``."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids so far."""
        return tuple(np.concatenate([part for part, _ in self._segments(_as_array(self.prompt))]).tolist())

    def _segments(self, prompt: Array) -> list[tuple[Array, Completion | None]]:
        """Ids of each segment, with the completion that sampled them."""
        segments: list[tuple[Array, Completion | None]] = [(prompt, None)]
        for i, turn in enumerate(self.turns):
            segments.append((turn.tokens, turn))
            if i < len(self.observations):
                segments.append((_as_array(self.observations[i]), None))
        return segments


def arrays_of(transcripts: Sequence[Transcript]) -> tuple[tuple[int, ...], dict[str, Array]]:
    """Lengths and arrays of a group; observations are masked and carry version -1, as the prompt does.

    Args:
        transcripts: of one prompt, each with at least one turn.

    Returns:
        Tokens of each, and ``tokens``, ``loss_mask``, ``logprobs``, ``versions`` [tokens of all].
    """
    prompt = _as_array(transcripts[0].prompt)
    each = [transcript._segments(prompt) for transcript in transcripts]
    segments = [segment for one in each for segment in one]
    sizes = [len(part) for part, _ in segments]
    turns = [turn for _, turn in segments if turn is not None]
    sampled = np.repeat([turn is not None for _, turn in segments], sizes)
    logprobs, versions = np.zeros(len(sampled), np.float32), np.full(len(sampled), -1, np.int32)
    logprobs[sampled] = np.concatenate([turn.logprobs for turn in turns])
    versions[sampled] = np.concatenate([turn.versions for turn in turns])
    tokens = np.concatenate([part for part, _ in segments])
    arrays = {"tokens": tokens, "loss_mask": sampled.view(np.uint8), "logprobs": logprobs, "versions": versions}
    return tuple(sum(len(part) for part, _ in one) for one in each), arrays


def _as_array(ids: tuple[int, ...]) -> Array:
    return np.asarray(ids, np.int32)
