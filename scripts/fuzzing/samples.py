"""Valid input to begin with: groups of both domains, the rules that they keep, manifests."""

from __future__ import annotations

from typing import Any

import numpy as np

from async_rl.buffer.control_rules import ControlRules
from async_rl.buffer.records import Limits
from async_rl.config import Config, ControlConfig, RunConfig, parse_config, parse_control
from async_rl.control.spaces import Action, Observation, Spaces
from async_rl.data import Group, make_group, token_trajectory
from async_rl.protocol import Ticket
from async_rl.weights.manifest import Manifest, Tensor, chunk_checksums, combine

NUM_TASKS = 7
VOCABULARY = 50
SPACES = Spaces(
    observations={"policy": Observation((2,)), "camera": Observation((1, 2), "uint8")},
    action=Action(kind="discrete", size=2, choices=(3, 2)),
)


def token_config(**sections: Any) -> Config:
    """Two groups of two a step, η = 1."""
    raw = {
        "steps": 4,
        "sampling": {"group_size": 2, "max_new_tokens": 4},
        "buffer": {"groups_per_step": 2, "max_staleness": 1, "heartbeat_s": 10.0, "lease_s": 30.0},
    }
    return parse_config({**raw, **sections})


def control_config() -> ControlConfig:
    """Three steps of two environments a fragment."""
    buffer = {"groups_per_step": 2, "heartbeat_s": 10.0}
    env = {"num_envs": 2, "horizon": 3}
    return parse_control(
        {"domain": "control", "steps": 4, "buffer": buffer, "algorithm": {"minibatches": 1}, "env": env}
    )


def limits(config: RunConfig) -> Limits:
    """What model or environment say."""
    if isinstance(config, ControlConfig):
        return Limits(num_tasks=config.num_tasks, control=ControlRules.from_config(config, SPACES))
    return Limits(num_tasks=NUM_TASKS, vocabulary=VOCABULARY, context=16)


def token_group(ordinal: int = 0, attempt: int = 0, task_index: int = 0, version: int = 0) -> Group:
    """Two sequences with two prompt tokens and three sampled ones."""
    made = [
        token_trajectory(
            prompt=[1, 2], completion=[5, 6, 7], logprobs=[-0.5] * 3, versions=[version] * 3, reward=float(i)
        )
        for i in range(2)
    ]
    meta = {"actor": "a", "prompt": "1+1=", "completions": ["2", "3"]}
    return make_group(ordinal=ordinal, attempt=attempt, task_index=task_index, trajectories=made, meta=meta)


def fragment(ordinal: int = 0, attempt: int = 0, task_index: int = 0, version: int = 0) -> Group:
    """A fragment in which environment 0 is truncated."""
    shape = (3, 2)
    truncated = np.zeros(shape, np.bool_)
    truncated[1, 0] = True
    arrays: dict[str, Any] = {
        "actions": np.ones((*shape, 2), np.int32),
        "logprobs": np.full(shape, -0.5, np.float32),
        "versions": np.full(shape, version, np.int32),
        "step_rewards": np.ones(shape, np.float32),
        "terminated": np.zeros(shape, np.bool_),
        "truncated": truncated,
        "episode_returns": np.array([7.0], np.float32),
        "episode_lengths": np.array([9], np.int32),
    }
    for name, space in SPACES.observations.items():
        arrays[f"obs/{name}"] = np.ones((*shape, *space.shape), space.dtype)
        arrays[f"last_obs/{name}"] = np.ones((1, 2, *space.shape), space.dtype)
        arrays[f"final_obs/{name}"] = np.ones((1, *space.shape), space.dtype)
    return Group(
        ordinal=ordinal,
        attempt=attempt,
        task_index=task_index,
        lengths=(3,),
        arrays=arrays,
        rewards=np.zeros(1, np.float32),
    )


def group_for(config: RunConfig, ticket: Ticket) -> Group:
    """What a good actor of the run would send."""
    make = fragment if config.is_control else token_group
    return make(ticket.ordinal, ticket.attempt, ticket.task_index, ticket.version)


def manifest(version: int, epoch: int = 0, run_id: str = "r") -> Manifest:
    """Of two floats."""
    bytes_ = memoryview(np.full(2, version, np.float32)).cast("B")
    chunks = chunk_checksums(bytes_, 4)
    return Manifest(
        version=version,
        run_id=run_id,
        tensors=(Tensor("w", "float32", (2,), 0),),
        nbytes=8,
        chunk_bytes=4,
        chunks=chunks,
        checksum=combine(chunks),
        segment="/dev/shm/none",
        host="h",
        epoch=epoch,
    )
