"""Made-up fragments of environments for the tests of the control learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from async_rl.config import ControlConfig, parse_control
from async_rl.control.networks import Actor, Critic, reset_state
from async_rl.control.spaces import Action, Observation, Spaces
from async_rl.data import Group
from async_rl.timer import StateTimer
from learner.control.domain import ControlDomain, make_method
from learner.control.method import Method
from learner.group import LearnerGroup, Placement

SIZE = 4


def continuous(size: int = 2) -> Spaces:
    bounds = ((-1.0,) * size, (1.0,) * size)
    action = Action(kind="continuous", size=size, low=bounds[0], high=bounds[1])
    return Spaces(observations={"policy": Observation((SIZE,))}, action=action)


def discrete(*choices: int) -> Spaces:
    action = Action(kind="discrete", size=len(choices), choices=choices)
    return Spaces(observations={"policy": Observation((SIZE,))}, action=action)


def control_config(**sections: dict[str, Any]) -> ControlConfig:
    """Small networks and batches unless told otherwise."""
    raw: dict[str, Any] = {"domain": "control", "env": {"num_envs": 8, "horizon": 6}, "policy": {"hidden": [16, 16]}}
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section} if isinstance(section, dict) else section
    return parse_control(raw)


def alone() -> LearnerGroup:
    return LearnerGroup(Placement(0, 1, torch.device("cpu")), 60.0)


def build_domain(
    config: ControlConfig, spaces: Spaces, group: LearnerGroup | None = None, seed: int = 0
) -> tuple[ControlDomain, Method]:
    torch.manual_seed(seed)
    group = group or alone()
    method = make_method(config, spaces, group)
    return ControlDomain(config, spaces, method, group, StateTimer()), method


@torch.no_grad()
def fragment(
    config: ControlConfig,
    spaces: Spaces,
    method: Any,
    *,
    seed: int = 0,
    version: int = 0,
    num_envs: int | None = None,
    told: bool = True,
    next_step: bool = False,
    ends: float = 0.1,
) -> Group:
    """A fragment as an actor with the method's present networks would send it, of environments that are noise.

    Args:
        config: horizon, and environments unless ``num_envs``.
        spaces: of the environment.
        method: its actor (and critic) act.
        seed: of everything random.
        version: that acts.
        num_envs: N
        told: send the observations that followed truncated steps.
        next_step: the step after an episode's end only resets.
        ends: share of the steps that end an episode; half are truncated.
    """
    actor: Actor = method.modules["policy"]
    critic: Critic = method.modules["critic"]
    generator = torch.Generator().manual_seed(seed)
    horizon, n = config.env.horizon, num_envs or config.env.num_envs
    obs = torch.randn(horizon + 1, n, SIZE, generator=generator) * 2 + 0.5
    done = torch.rand(horizon, n, generator=generator) < ends
    resets = torch.zeros(horizon, n, dtype=torch.bool)
    if next_step:
        for t in range(1, horizon):
            resets[t] = done[t - 1] & ~resets[t - 1]
            done[t] &= ~resets[t]
    truncated = done & (torch.rand(horizon, n, generator=generator) < 0.5)
    final = torch.randn(horizon, n, SIZE, generator=generator)
    if next_step:
        final = obs[1:]
    names = ("actor", "critic")
    state_of = {
        name: network.initial_state(n, torch.device("cpu"))
        for name, network in zip(names, (actor, critic), strict=True)
    }
    state_of = {
        name: tuple(torch.randn(s.shape, generator=generator) for s in state) for name, state in state_of.items()
    }
    hidden = {f"hidden/{name}{i}": part.numpy() for name, state in state_of.items() for i, part in enumerate(state)}
    state, actions, logprobs = state_of["actor"], [], []
    for t in range(horizon):
        if t:
            state = reset_state(state, done[t - 1] | resets[t - 1])
        features, state = actor.step(obs[t], state)
        distribution = actor.distribution(features)
        actions.append(distribution.sample(generator))
        logprobs.append(distribution.log_prob(actions[-1]))
    kind = torch.float32 if spaces.action.kind == "continuous" else torch.int32
    arrays = {
        "obs/policy": obs[:-1].numpy(),
        "last_obs/policy": obs[-1:].numpy(),
        "actions": torch.stack(actions).to(kind).numpy(),
        "logprobs": torch.stack(logprobs).numpy(),
        "versions": torch.where(resets, -1, version).int().numpy(),
        "step_rewards": torch.randn(horizon, n, generator=generator).numpy(),
        "terminated": (done & ~truncated).numpy(),
        "truncated": truncated.numpy(),
        "episode_returns": np.full(int(done.sum()), 2.0, np.float32),
        "episode_lengths": np.full(int(done.sum()), 5, np.int32),
        **hidden,
    }
    if told:
        arrays["final_obs/policy"] = final[truncated].numpy()
    for array in arrays.values():
        array.flags.writeable = False  # as they come off the wire
    return Group(
        ordinal=seed, attempt=0, task_index=0, lengths=(horizon,), arrays=arrays, rewards=np.zeros(1, np.float32)
    )
