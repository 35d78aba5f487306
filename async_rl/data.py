"""The one thing that flows: trajectories of named arrays, in groups that share a ticket.

    ticket ──► Trajectory × group_size ──► Group ──► buffer ──► batch ──► update

A group keeps each named array of all its trajectories *concatenated along the first axis*, with ``lengths`` to split
them, so that the wire carries one frame per array and nothing is copied on the way. ``Trajectory`` is a view of it.

| name         | dtype   | shape | meaning                                                                |
|--------------|---------|-------|------------------------------------------------------------------------|
| tokens       | int32   | [T]   | prompt, then what was sampled (and tool output)                        |
| loss_mask    | uint8   | [T]   | 1 where the policy sampled the token, 0 on prompt and tool output      |
| logprobs     | float32 | [T]   | of the distribution that was sampled, temperature included; 0 off mask |
| versions     | int32   | [T]   | weight version that sampled the token; -1 off mask                     |
| ref_logprobs | float32 | [T]   | optional: of the frozen reference                                      |
| values       | float32 | [T]   | optional: of the critic                                                |

The control domain has arrays [T, N, ...] of its own, see :mod:`async_rl.control.fragment`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

TOKEN_FIELDS: Mapping[str, str] = {
    "tokens": "int32",
    "loss_mask": "uint8",
    "logprobs": "float32",
    "versions": "int32",
    "ref_logprobs": "float32",
    "values": "float32",
}
"""dtype of each known array of the token domain; all are ``[T]``."""

UNALIGNED = ("last_obs/", "final_obs/", "hidden/", "episode_")
"""Arrays of the control domain whose names begin so have a first axis of their own, see
:mod:`async_rl.control.fragment`."""

REQUIRED_TOKEN_FIELDS = ("tokens", "loss_mask", "logprobs", "versions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One rollout: named arrays that share their first axis ``T``, and its reward."""

    arrays: Mapping[str, Array]
    """Arrays by name, see the table of this module."""
    reward: float
    """Outcome reward; NaN means that no verifier could score it."""

    @property
    def tokens(self) -> Array:
        """int32 ``[T]``: prompt and completion."""
        return self.arrays["tokens"]

    @property
    def loss_mask(self) -> Array:
        """uint8 ``[T]``: 1 where the policy sampled."""
        return self.arrays["loss_mask"]

    @property
    def logprobs(self) -> Array:
        """float32 ``[T]``: behaviour log-probabilities."""
        return self.arrays["logprobs"]

    @property
    def versions(self) -> Array:
        """int32 ``[T]``: weight version per sampled token, -1 elsewhere."""
        return self.arrays["versions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trajectories of one ticket, arrays concatenated along their first axis."""

    ordinal: int
    """Position of the ticket in the task stream: identifies the work across attempts and resumes."""
    attempt: int
    """0 for the first attempt at this ordinal; an expired ticket is reissued with the next number."""
    task_index: int
    """Which task of the data set was rolled out."""
    lengths: tuple[int, ...]
    """``T`` of each trajectory."""
    arrays: Mapping[str, Array]
    """Concatenated arrays ``[sum(lengths), ...]`` by name."""
    rewards: npt.NDArray[np.float32]
    """float32 ``[G]``."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Small plain facts (actor id, seconds spent, verifier outcome); never needed for the maths."""
    laid_out: Any = field(default=None, init=False, repr=False, compare=False)
    """How it came off the wire, see :mod:`async_rl.wire`; a changed copy (``dataclasses.replace``) has none."""
    _oldest: int = field(default=-1, init=False, repr=False, compare=False)
    _newest: int = field(default=-2, init=False, repr=False, compare=False)
    _sampled: int = field(default=-1, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def trajectories(self) -> Iterator[Trajectory]:
        """The trajectories as views, in order."""
        start = 0
        for length, reward in zip(self.lengths, self.rewards, strict=True):
            stop = start + length
            yield Trajectory(arrays={k: v[start:stop] for k, v in self.arrays.items()}, reward=float(reward))
            start = stop

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled, or steps of environments in which it acted, in any group off the wire."""
        if self._sampled < 0:
            object.__setattr__(self, "_sampled", self._count_sampled())
        return self._sampled

    def _count_sampled(self) -> int:
        if "loss_mask" in self.arrays:  # 1 where the version is not -1
            return int(np.count_nonzero(self.arrays["loss_mask"]))
        versions = self.arrays["versions"]
        # in an episode each part of an action has a version
        is_episodes = versions.ndim == 2 and "step_rewards" not in self.arrays
        return sum(self.lengths) if is_episodes else int(np.count_nonzero(versions >= 0))

    @property
    def oldest_version(self) -> int:
        """Oldest weight version among the sampled tokens of all trajectories.

        Raises:
            ValueError: if nothing was sampled, because such a group has no age.
        """
        if self._oldest < 0:  # asked for at each of its stations, from arrays that do not change
            object.__setattr__(self, "_oldest", oldest_version(self.arrays["versions"]))
        return self._oldest

    @property
    def newest_version(self) -> int:
        """Newest weight version among the sampled tokens of all trajectories; -1 if nothing was sampled."""
        if self._newest < -1:
            versions = self.arrays["versions"].ravel()
            object.__setattr__(self, "_newest", max(-1, largest(versions)) if versions.size else -1)
        return self._newest

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays.values()) + self.rewards.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """What one stage adds to one submitted group."""

    ordinal: int
    attempt: int
    stage: str
    """One of :data:`async_rl.protocol.STAGES`."""
    values: npt.NDArray[np.float32]
    """float32: the rewards ``[G]`` (stage ``reward``; NaN: could not be scored), or the reference's log-probabilities
    ``[sum(lengths)]`` (stage ``reference``; what stands where nothing was sampled is ignored)."""


def is_correct(rewards: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which rewards ``[S]`` count as correct in ``accuracy``: those of 1 or more. The only definition."""
    correct: npt.NDArray[np.bool_] = rewards >= 1.0
    return correct


_SHORT = 2048


def smallest(values: Array) -> Any:
    """Of ``[n]`` at least one; NaN if one is. A short array is searched for its place, in half the time."""
    return values.item(values.argmin()) if len(values) < _SHORT else values.min().item()


def largest(values: Array) -> Any:
    """Of ``[n]`` at least one; NaN if one is."""
    return values.item(values.argmax()) if len(values) < _SHORT else values.max().item()


_UNSIGNED = {size: np.dtype(f"uint{8 * size}") for size in (1, 2, 4, 8)}


def oldest_version(versions: Array) -> int:
    """Oldest version in an array of per-token versions, entries of -1 (not sampled) left out.

    Raises:
        ValueError: if no token was sampled.
    """
    # read without a sign, -1 is the largest number there is, and need not be left out
    unsigned = versions.ravel().view(_UNSIGNED[versions.itemsize])
    oldest = smallest(unsigned) if unsigned.size else -1
    if oldest < 0 or oldest >> 8 * versions.itemsize - 1:
        raise ValueError("no sampled token, so no age")
    return oldest


def age(item: Trajectory | Group, version: int) -> int:
    """Staleness in learner versions: ``version`` minus the oldest sampled token's version. The only definition.

    ``version`` is the number of updates made before the item is used; step ``s`` trains at version ``s``.
    """
    return version - (item.oldest_version if isinstance(item, Group) else oldest_version(item.arrays["versions"]))


def make_group(
    *,
    ordinal: int,
    attempt: int,
    task_index: int,
    trajectories: Sequence[Trajectory],
    meta: Mapping[str, Any] | None = None,
) -> Group:
    """Concatenate trajectories (at least one, all with the same array names) into a group."""
    names = list(trajectories[0].arrays)
    return Group(
        ordinal=ordinal,
        attempt=attempt,
        task_index=task_index,
        lengths=tuple(len(t.arrays[names[0]]) for t in trajectories),
        arrays={n: np.concatenate([t.arrays[n] for t in trajectories]) for n in names},
        rewards=np.asarray([t.reward for t in trajectories], dtype=np.float32),
        meta=dict(meta or {}),
    )


def token_trajectory(
    *,
    prompt: Sequence[int],
    completion: Sequence[int] | Array,
    logprobs: Sequence[float] | Array,
    versions: Sequence[int] | Array,
    reward: float,
) -> Trajectory:
    """Build a single-turn token trajectory: prompt masked out, completion sampled by the given versions."""
    num_prompt = len(prompt)
    total = num_prompt + len(completion)
    tokens = np.empty(total, np.int32)
    tokens[:num_prompt] = prompt
    tokens[num_prompt:] = completion
    mask = np.zeros(total, np.uint8)
    mask[num_prompt:] = 1
    full_logprobs = np.zeros(total, np.float32)
    full_logprobs[num_prompt:] = logprobs
    full_versions = np.full(total, -1, np.int32)
    full_versions[num_prompt:] = versions
    return Trajectory(
        arrays={"tokens": tokens, "loss_mask": mask, "logprobs": full_logprobs, "versions": full_versions},
        reward=reward,
    )
