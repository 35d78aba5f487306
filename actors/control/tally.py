"""Returns and lengths of the episodes that ended in a fragment, and of those that go on.

rewards, ends, acted [T, N] + what the fragment before left over ─► finished [E] each, left over [N] each
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Running:
    """Episodes that have not ended yet, one per environment."""

    returns: npt.NDArray[np.float64]
    """[N]: rewards so far."""
    lengths: npt.NDArray[np.int64]
    """[N]: steps so far."""

    @classmethod
    def none(cls, num_envs: int) -> Running:
        """Nothing so far."""
        return cls(np.zeros(num_envs), np.zeros(num_envs, np.int64))


@dataclass(frozen=True, slots=True)
class Finished:
    """Episodes that ended, in order of time."""

    returns: npt.NDArray[np.float32]
    """[E]: sums of rewards."""
    lengths: npt.NDArray[np.int32]
    """[E]: steps."""
    envs: npt.NDArray[np.int64]
    """[E]: environment of each."""


def tally(
    rewards: npt.NDArray[np.float32], ends: npt.NDArray[np.bool_], acted: npt.NDArray[np.bool_], before: Running
) -> tuple[Finished, Running]:
    """Add up rewards and steps between the ends of episodes.

    Args:
        rewards: [T, N]
        ends: [T, N]: the episode ended with this step.
        acted: [T, N]: False where a step only reset the environment; it belongs to no episode.
        before: what the steps before left over.

    Returns:
        What ended, and what goes on.
    """
    returns = np.cumsum(np.where(acted, rewards, 0), axis=0, dtype=np.float64) + before.returns
    lengths = np.cumsum(acted, axis=0, dtype=np.int64) + before.lengths
    envs, steps = ends.T.nonzero()  # by environment, then by time
    order = np.argsort(steps, kind="stable")
    last = np.append(envs[1:] != envs[:-1], True)[: len(envs)]
    done_returns, left_returns = _since_the_end_before(returns, steps, envs, last)
    done_lengths, left_lengths = _since_the_end_before(lengths, steps, envs, last)
    finished = Finished(done_returns.astype(np.float32)[order], done_lengths.astype(np.int32)[order], envs[order])
    return finished, Running(left_returns, left_lengths)


def _since_the_end_before(
    sums: npt.NDArray[Any], steps: npt.NDArray[np.int64], envs: npt.NDArray[np.int64], last: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Differences of running sums [T, N] at ends [E], and what is left over [N] behind each environment's last end."""
    at_end = sums[steps, envs]
    at_end_before = np.zeros_like(at_end)
    same = ~last[:-1]  # the next end is of the same environment
    at_end_before[1:][same] = at_end[:-1][same]
    left = sums[-1].copy()
    left[envs[last]] -= at_end[last]
    return at_end - at_end_before, left
