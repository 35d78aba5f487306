"""Policy and critic at the parameters of a step's start, over the whole batch, without gradients.

Rollout ─► look ─► StepStart: distribution, log-probabilities, values, values of what follows each step

Feed-forward networks run over chunks that stay in the cache. Recurrent ones walk through the fragment from the state
that the actor sent, so that the state behind each truncated step is at hand for the value of its final observation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from async_rl.control.distributions import Distribution
from async_rl.control.networks import Actor, Critic, State, reset_state
from learner.control.fused import fuse
from learner.control.returns import next_values
from learner.control.rollout import Rollout

CHUNK = 4096
"""Samples whose activations fit into a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStart:
    """What the networks said of T steps of N environments."""

    distribution: Distribution
    """Of the policy, batch axis [T·N]."""
    logprobs: torch.Tensor
    """[T, N], of the actions."""
    values: torch.Tensor
    """[T, N], of the state before each step."""
    following: torch.Tensor
    """[T, N], of the state after each step; see :func:`learner.control.returns.next_values`."""


@torch.no_grad()
def look(actor: Actor, critic: Critic, rollout: Rollout) -> StepStart:
    """Forward policy and critic once."""
    looked = _walk_both(actor, critic, rollout) if actor.is_recurrent else _forward_both(actor, critic, rollout)
    distribution, values, last_values, final_values = looked
    steps = values.shape
    return StepStart(
        distribution=distribution,
        logprobs=distribution.log_prob(rollout.actions.flatten(0, 1)).view(steps),
        values=values,
        following=next_values(
            values, last_values, rollout.terminated, rollout.truncated, final_values, rollout.final_index
        ),
    )


def hidden_state(rollout: Rollout, network: str) -> State:
    """State [L, N, H] before the first step of a recurrent network, ``actor`` or ``critic``."""
    names = [name for name in rollout.states if name.startswith(network)]
    return tuple(rollout.states[name] for name in sorted(names))


_Looked = tuple[Distribution, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Distribution [T·N], values [T, N], last values [N], final values [K] or None."""


def _forward_both(actor: Actor, critic: Critic, rollout: Rollout) -> _Looked:
    obs = {name: array.flatten(0, 1) for name, array in rollout.obs.items()}
    final_values = None if rollout.final_obs is None else _values(actor, critic, rollout.final_obs)
    out = head_outputs(actor, actor.observe(obs))
    values = _values(actor, critic, obs).view(rollout.acted.shape)
    return actor.distribution_of(out), values, _values(actor, critic, rollout.last_obs), final_values


def _values(actor: Actor, critic: Critic, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Values [m] of observations [m, ...]."""
    if critic.shared:
        return in_chunks(lambda x: critic.value(actor.features(x)), actor.observe(obs))
    return head_outputs(critic, critic.observe(obs)).squeeze(-1)


def head_outputs(network: Actor | Critic, x: torch.Tensor) -> torch.Tensor:
    """Outputs of the head [m, O] for observations [m, D], of a feed-forward network that has its own encoder."""
    fused = fuse(network)
    if fused is not None:
        return fused(network.normalizer(x))
    return in_chunks(lambda part: network.head(network.features(part)), x)


def in_chunks(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``function`` over rows [m, ...], a chunk at a time on the CPU."""
    if len(x) <= CHUNK or x.device.type != "cpu":
        return function(x)
    return torch.cat([function(part) for part in x.split(CHUNK)])


def _walk_both(actor: Actor, critic: Critic, rollout: Rollout) -> _Looked:
    walked = _walk(actor, hidden_state(rollout, "actor"), rollout)
    of_critic = walked if critic.shared else _walk(critic, hidden_state(rollout, "critic"), rollout)
    features, last, final = of_critic
    final_values = None if final is None else critic.value(final)
    distribution = actor.distribution(walked[0].flatten(0, 1))
    return distribution, critic.value(features), critic.value(last), final_values


def _walk(
    network: Actor | Critic, state: State, rollout: Rollout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Features of all steps [T, N, F], of the last observation [N, F], of the final ones [K, F]."""
    x, final_x = network.observe(rollout.obs), None
    steps, envs = rollout.final_index
    rows_of: dict[int, list[int]] = {}
    if rollout.final_obs is not None:
        final_x = network.observe(rollout.final_obs)
        for row, step in enumerate(steps.tolist()):
            rows_of.setdefault(step, []).append(row)
    features, final = [], {}
    for step in range(rollout.num_steps):
        found, state = network.step(x[step], reset_state(state, rollout.resets[step]))
        features.append(found)
        if final_x is not None and step in rows_of:
            rows = torch.tensor(rows_of[step], device=x.device)
            final[step] = network.step(final_x[rows], tuple(part[:, envs[rows]] for part in state))[0]
    ended = rollout.terminated[-1] | rollout.truncated[-1] | ~rollout.acted[-1]
    last, _ = network.step(network.observe(rollout.last_obs), reset_state(state, ended))
    if final_x is None:
        return torch.stack(features), last, None
    order = torch.tensor([row for step in final for row in rows_of[step]], device=x.device)
    gathered = torch.cat(list(final.values()))
    return torch.stack(features), last, torch.empty_like(gathered).index_copy_(0, order, gathered)
