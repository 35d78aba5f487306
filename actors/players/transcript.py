"""One trajectory while it grows: the prompt, what was sampled, and what an environment said in between.

prompt · sampled · observation · sampled · ...          sampled tokens stay as they are: nothing is tokenised twice
mask 0      1           0            1
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from actors.engines.base import Completion
from async_rl.data import Array, Trajectory


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
        return tuple(np.concatenate([part for part, _ in self._segments()]).tolist())

    def trajectory(self, reward: float) -> Trajectory:
        """The arrays, for a group; observations are masked and carry version -1, as the prompt does."""
        segments = self._segments()
        lengths = [len(part) for part, _ in segments]
        tokens, mask = np.empty(sum(lengths), np.int32), np.zeros(sum(lengths), np.uint8)
        logprobs, versions = np.zeros(len(tokens), np.float32), np.full(len(tokens), -1, np.int32)
        stop = 0
        for (part, turn), length in zip(segments, lengths, strict=True):
            start, stop = stop, stop + length
            tokens[start:stop] = part
            if turn is not None:
                mask[start:stop], logprobs[start:stop], versions[start:stop] = 1, turn.logprobs, turn.versions
        arrays: dict[str, Array] = {"tokens": tokens, "loss_mask": mask, "logprobs": logprobs, "versions": versions}
        return Trajectory(arrays=arrays, reward=reward)

    def _segments(self) -> list[tuple[Array, Completion | None]]:
        """Ids of each segment, with the completion that sampled them."""
        segments: list[tuple[Array, Completion | None]] = [(np.asarray(self.prompt, np.int32), None)]
        for i, turn in enumerate(self.turns):
            segments.append((turn.tokens, turn))
            if i < len(self.observations):
                segments.append((np.asarray(self.observations[i], np.int32), None))
        return segments
