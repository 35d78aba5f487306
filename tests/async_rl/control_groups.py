"""Fragments and groups of episodes of a small made-up environment, for tests of the buffer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from async_rl.buffer.control_rules import ControlRules
from async_rl.buffer.records import Limits
from async_rl.config import ControlConfig, parse_control
from async_rl.control.spaces import Action, Observation, Spaces
from async_rl.data import Group
from async_rl.protocol import Ticket

T, N = 3, 2
SPACES = Spaces(
    observations={"policy": Observation((4,)), "camera": Observation((2, 2, 3), "uint8")},
    action=Action(kind="discrete", size=2, choices=(3, 2)),
)


def control_config(**sections: Any) -> ControlConfig:
    """T = 3 steps of N = 2 environments, two fragments a step."""
    raw: dict[str, Any] = {
        "domain": "control",
        "steps": 3,
        "buffer": {"groups_per_step": 2, "heartbeat_s": 0.3},
        "algorithm": {"minibatches": 1},
    }
    if sections.get("algorithm", {}).get("name") != "grpo":
        raw["env"] = {"num_envs": N, "horizon": T}
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section} if isinstance(section, dict) else section
    return parse_control(raw)


def control_limits(config: ControlConfig, spaces: Spaces = SPACES) -> Limits:
    return Limits(num_tasks=config.num_tasks, control=ControlRules.from_config(config, spaces))


def fragment(ordinal: int = 0, attempt: int = 0, version: int = 0, num_envs: int = N, **changes: Any) -> Group:
    """A sound one: environment 0 is truncated in step 1, reset in step 2. Changes: arrays; None takes one away."""
    shape = (T, num_envs)
    versions, truncated = np.full(shape, version, np.int32), np.zeros(shape, np.bool_)
    truncated[1, 0], versions[2, 0] = True, -1
    arrays: dict[str, Any] = {
        "actions": np.ones((*shape, 2), np.int32),
        "logprobs": np.full(shape, -0.5, np.float32),
        "versions": versions,
        "step_rewards": np.arange(T * num_envs, dtype=np.float32).reshape(shape),
        "terminated": np.zeros(shape, np.bool_),
        "truncated": truncated,
        "episode_returns": np.array([7.0], np.float32),
        "episode_lengths": np.array([9], np.int32),
    }
    for name, space in SPACES.observations.items():
        arrays[f"obs/{name}"] = np.ones((*shape, *space.shape), space.dtype)
        arrays[f"last_obs/{name}"] = np.ones((1, num_envs, *space.shape), space.dtype)
        arrays[f"final_obs/{name}"] = np.ones((1, *space.shape), space.dtype)
    arrays = {k: v for k, v in (arrays | changes).items() if v is not None}
    return Group(
        ordinal=ordinal,
        attempt=attempt,
        task_index=0,
        lengths=(T,),
        arrays=arrays,
        rewards=np.zeros(1, np.float32),
    )


def episodes(ordinal: int = 0, lengths: tuple[int, ...] = (2, 3), version: int = 0, task_index: int = 0) -> Group:
    """Episodes from one start (``grpo``); the reward of each is its position."""
    total = sum(lengths)
    arrays: dict[str, Any] = {
        "actions": np.ones((total, 2), np.int32),
        "logprobs": np.full((total, 2), -0.5, np.float32),
        "versions": np.full((total, 2), version, np.int32),
    }
    for name, space in SPACES.observations.items():
        arrays[f"obs/{name}"] = np.ones((total, *space.shape), space.dtype)
    return Group(
        ordinal=ordinal,
        attempt=0,
        task_index=task_index,
        lengths=lengths,
        arrays=arrays,
        rewards=np.arange(len(lengths), dtype=np.float32),
    )


def filled(ticket: Ticket, **changes: Any) -> Group:
    """A sound fragment for a ticket."""
    group = fragment(version=ticket.version, **changes)
    return replace(group, ordinal=ticket.ordinal, attempt=ticket.attempt, task_index=ticket.task_index)
