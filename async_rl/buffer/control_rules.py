"""What the groups of a control run must be, and what episodes ended in them. Pure.

ControlConfig, spaces.json ─► ControlRules ─► control_fault (by the judge) · episodes_of (for the window of the metrics)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from async_rl.config import ControlConfig
from async_rl.control.fragment import FINAL_OBS, HIDDEN, LAST_OBS, OBS, check_control_group
from async_rl.control.spaces import Spaces
from async_rl.data import Array, Group

_RETURNS, _LENGTHS = "episode_returns", "episode_lengths"
_STEPS = ("actions", "logprobs", "versions")
_OUTCOMES = ("step_rewards", "terminated", "truncated", _RETURNS, _LENGTHS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRules:
    """What a group is measured against."""

    spaces: Spaces
    """Of the environment."""
    horizon: int
    """T of a fragment; the longest episode where ``episodes``."""
    episodes: bool
    """Whether a group holds whole episodes (``grpo``) instead of one fragment."""
    hidden: tuple[str, ...] = ()
    """Recurrent policies: names of the states that a fragment brings along."""
    hidden_shape: tuple[int, int] = (0, 0)
    """(layers, width) of each."""

    @classmethod
    def from_config(cls, config: ControlConfig, spaces: Spaces) -> ControlRules:
        """The rules of a run."""
        episodes = config.algorithm.name == "grpo"
        num_states = {"gru": 1, "lstm": 2}.get(config.policy.network, 0)
        has_critic = config.algorithm.name == "ppo" and config.policy.encoder == "separate"
        owners = ("actor", "critic") if has_critic else ("actor",)
        return cls(
            spaces=spaces,
            horizon=config.episodes.max_steps if episodes else config.env.horizon,
            episodes=episodes,
            hidden=tuple(f"{HIDDEN}{owner}{i}" for owner in owners for i in range(num_states)),
            hidden_shape=(config.policy.rnn_layers, config.policy.rnn_hidden),
        )

    @property
    def known(self) -> frozenset[str]:
        """Names of the arrays that a group may have."""
        groups = self.spaces.observations
        if self.episodes:
            return frozenset((*_STEPS, _RETURNS, _LENGTHS, *(OBS + name for name in groups)))
        observed = (prefix + name for prefix in (OBS, LAST_OBS, FINAL_OBS) for name in groups)
        return frozenset((*_STEPS, *_OUTCOMES, *self.hidden, *observed))


def control_fault(group: Group, rules: ControlRules) -> str:
    """Why the learner could not train on the group, as a reason that is counted; empty if it can."""
    if not rules.known.issuperset(group.arrays):
        return "unknown_array"
    return (
        check_control_group(group, rules.spaces, rules.horizon, episodes=rules.episodes)
        or _hidden_fault(group, rules)
        or _episode_fault(group, rules)
    )


def episodes_of(group: Group, rules: ControlRules) -> tuple[Array, Array]:
    """Returns and lengths, both [E], of the episodes that ended in a faultless group."""
    if rules.episodes:
        return group.arrays.get(_RETURNS, group.rewards), np.asarray(group.lengths)
    nothing = np.empty(0, np.float32)
    return group.arrays.get(_RETURNS, nothing), group.arrays.get(_LENGTHS, nothing)


def _hidden_fault(group: Group, rules: ControlRules) -> str:
    for name in rules.hidden:
        if name not in group.arrays:
            return "missing_array"
        layers, _, width = group.arrays[name].shape
        if (layers, width) != rules.hidden_shape:
            return "bad_shape"
    return ""


def _episode_fault(group: Group, rules: ControlRules) -> str:
    """What is wrong with what is told of episodes: one for each end (``grpo``: for each trajectory), or nothing."""
    returns, lengths = group.arrays.get(_RETURNS), group.arrays.get(_LENGTHS)
    if returns is None and lengths is None:
        return ""
    if returns is None or lengths is None:
        return "missing_array"
    if returns.dtype != np.float32 or lengths.dtype != np.int32 or returns.ndim != 1:
        return "bad_shape"
    ends = len(group) if rules.episodes else np.count_nonzero(group.arrays["terminated"] | group.arrays["truncated"])
    if returns.shape != (ends,) or lengths.shape != (ends,):
        return "wrong_episodes"
    return "" if bool((lengths > 0).all()) else "wrong_episodes"
