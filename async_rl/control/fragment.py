"""The arrays of a control group, by name, and whether a group that came in is one.

A *fragment* is T steps of N environments, one trajectory with arrays [T, N, ...]. The environments go on where the
fragment before ended, so that what follows the last step is sent along.

| name            | dtype          | shape       | meaning                                                            |
|-----------------|----------------|-------------|--------------------------------------------------------------------|
| obs/GROUP       | as space       | [T, N, ...] | what the policy saw before the step                                |
| actions         | float32, int32 | [T, N, A]   | what it did, before the environment clipped it                     |
| logprobs        | float32        | [T, N]      | of the action, summed over its parts                               |
| versions        | int32          | [T, N]      | weight version that acted; -1: a reset step, no action counted     |
| step_rewards    | float32        | [T, N]      | of the environment                                                 |
| terminated      | bool           | [T, N]      | the episode ended in a state without a future                      |
| truncated       | bool           | [T, N]      | it was cut off: its future is worth what the critic says           |
| last_obs/GROUP  | as space       | [1, N, ...] | what the policy sees next                                          |
| final_obs/GROUP | as space       | [K, ...]    | what followed the K truncated steps, row-major as in ``truncated`` |
| hidden/NAME     | float32        | [L, N, H]   | recurrent: state before the first step, of layer l                 |
| episode_returns | float32        | [E]         | sums of rewards of the episodes that ended in the fragment         |
| episode_lengths | int32          | [E]         | and their steps                                                    |

``final_obs`` is there for all groups or for none: some environments do not tell it.

A group of *episodes* (``grpo``) has G trajectories, the arrays concatenated over time: ``obs/GROUP`` [S, ...],
``actions`` [S, A], ``logprobs`` and ``versions`` [S, A] (each part of an action has its own), and ``rewards`` [G], one
per episode, as it was judged; ``episode_returns`` and ``episode_lengths`` [G] beside it are what the environment says.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from async_rl.control.spaces import Action, Spaces
from async_rl.data import Array, Group

OBS, LAST_OBS, FINAL_OBS, HIDDEN = "obs/", "last_obs/", "final_obs/", "hidden/"
STEP_FIELDS: Mapping[str, str] = {
    "logprobs": "float32",
    "versions": "int32",
    "step_rewards": "float32",
    "terminated": "bool",
    "truncated": "bool",
}
"""dtype of the arrays [T, N] of a fragment."""
LOGPROBS = (-1e4, 1e4)
"""Log-probabilities (densities may exceed 1) lie between these, or their ratios would overflow."""
LARGEST = 1e15
"""All other numbers are below it: the squares of larger ones overflow in float32, and one that a normaliser has taken
in would blind it for good, without a word."""


def check_control_group(group: Group, spaces: Spaces, horizon: int, *, episodes: bool) -> str:
    """What is wrong with a submitted group, as a reason that is counted; empty if the learner can train on it.

    Args:
        group: decoded from the wire.
        spaces: of the environment.
        horizon: T that a fragment must have; the longest episode where ``episodes``.
        episodes: whether it is a group of episodes.
    """
    return _check_episodes(group, spaces, horizon) if episodes else _check_fragment(group, spaces, horizon)


def _check_fragment(group: Group, spaces: Spaces, horizon: int) -> str:
    arrays = group.arrays
    if len(group) != 1 or group.lengths[0] != horizon:
        return "wrong_horizon"
    versions = arrays["versions"]
    if versions.ndim != 2 or versions.shape[1] < 1:
        return "bad_shape"
    steps = versions.shape
    for name, dtype in STEP_FIELDS.items():
        if name not in arrays:
            return "missing_array"
        if arrays[name].dtype != dtype or arrays[name].shape != steps:
            return "bad_shape"
    num_truncated = int(arrays["truncated"].sum())
    told = any(name.startswith(FINAL_OBS) for name in arrays)
    for name, space in spaces.observations.items():
        expected = {OBS + name: (*steps, *space.shape), LAST_OBS + name: (1, steps[1], *space.shape)}
        expected |= {FINAL_OBS + name: (num_truncated, *space.shape)} if told else {}
        for key, shape in expected.items():
            if key not in arrays:
                return "missing_array"
            if arrays[key].dtype != space.dtype or arrays[key].shape != shape:
                return "bad_shape"
    for name, array in arrays.items():
        if name.startswith(HIDDEN) and (array.dtype != np.float32 or array.ndim != 3 or array.shape[1] != steps[1]):
            return "bad_shape"
    if (arrays["terminated"] & arrays["truncated"]).any():
        return "terminated_and_truncated"
    return _check_acts(arrays, spaces.action, (*steps, spaces.action.size), versions >= 0)


def _check_episodes(group: Group, spaces: Spaces, max_steps: int) -> str:
    arrays, total = group.arrays, sum(group.lengths)
    if max(group.lengths) > max_steps:
        return "too_long"
    steps = (total, spaces.action.size)
    for name in ("logprobs", "versions"):
        if name not in arrays or arrays[name].dtype != STEP_FIELDS[name] or arrays[name].shape != steps:
            return "bad_shape"
    for name, space in spaces.observations.items():
        array = arrays.get(OBS + name)
        if array is None:
            return "missing_array"
        if array.dtype != space.dtype or array.shape != (total, *space.shape):
            return "bad_shape"
    if (arrays["versions"] < 0).any():
        return "nothing_sampled"
    return _check_acts(arrays, spaces.action, steps, np.ones(steps, np.bool_))


def _check_acts(arrays: Mapping[str, Array], action: Action, shape: tuple[int, ...], acted: Array) -> str:
    """Shape and range of the actions, and numbers that are none.

    Args:
        arrays: of the group.
        action: its space.
        shape: of ``actions``.
        acted: where logprobs count, of their shape.
    """
    actions = arrays.get("actions")
    if actions is None:
        return "missing_array"
    if actions.shape != shape or actions.dtype != ("float32" if action.kind == "continuous" else "int32"):
        return "bad_shape"
    if action.kind == "discrete" and ((actions < 0) | (actions >= np.asarray(action.choices, np.int32))).any():
        return "action_outside_space"
    logprobs = arrays["logprobs"][acted]
    if not ((logprobs >= LOGPROBS[0]) & (logprobs <= LOGPROBS[1])).all():  # NaN is in no range
        return "bad_logprobs"
    floats = [a for a in arrays.values() if a.dtype == np.float32 and a.size]
    if all(a.min() > -LARGEST and a.max() < LARGEST for a in floats):  # NaN is in no range
        return ""
    return "too_large" if all(np.isfinite(a).all() for a in floats) else "not_finite"
