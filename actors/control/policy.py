"""The acting policy: networks that load published weights between two environment steps, and say what to do.

published bytes ──► flat vector ──views──► actor (critic: only for its hidden state)
observations [N, ..] ─► distribution ─► actions [N, A], log-probabilities [N]
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from actors.engines.flat_weights import FlatWeights
from async_rl.config import ControlConfig
from async_rl.control.distributions import Distribution
from async_rl.control.networks import Critic, State, build_actor, build_critic, reset_state
from async_rl.control.recurrence import run_step
from async_rl.control.spaces import Action, Spaces
from async_rl.errors import WeightsError
from async_rl.weights.manifest import Manifest

__all__ = ["Policy", "State"]


class Policy:
    """The networks of one actor process.

    Args:
        config: networks and observations.
        spaces: of the environment.
        device: where it computes.
        greedy: :meth:`act` takes the most likely action (evaluation).

    Raises:
        ConfigError: the networks cannot read these observations.
    """

    last_pause_s = 0.0
    """Nothing else is stopped while weights are swapped: what that takes is in the time of the commit."""

    def __init__(self, config: ControlConfig, spaces: Spaces, device: torch.device, *, greedy: bool = False) -> None:
        self.device, self.version, self.proven, self.greedy = device, -1, False, greedy
        self.action: Action = spaces.action
        self.actor = build_actor(config, spaces).to(device)
        self._critic: Critic | None = None
        if _carries_critic(config):
            self._critic = build_critic(config, spaces, self.actor).to(device)
        published = _published(self.actor, self._critic)
        self._weights = FlatWeights(dict(published.named_parameters()) | dict(published.named_buffers()))
        self._num_own = len(self.actor.initial_state(1, device))
        """Arrays of the actor's state, which stand before the critic's."""
        num_others = len(self.initial_state(1)) - self._num_own
        self.hidden = (*(f"actor{i}" for i in range(self._num_own)), *(f"critic{i}" for i in range(num_others)))
        """Names of the arrays of a state, in its order; empty without recurrence."""

    def initial_state(self, num_envs: int) -> State:
        """Hidden state of the first step of an episode, [L, N, H] each: the actor's, then the critic's."""
        own = self.actor.initial_state(num_envs, self.device)
        return own if self._critic is None else (*own, *self._critic.initial_state(num_envs, self.device))

    def reset_state(self, state: State, mask: torch.Tensor) -> State:
        """``state`` with zeros where ``mask`` [N], for environments that begin a new episode."""
        return reset_state(state, mask) if state else state

    @torch.inference_mode()
    def distribution(self, observations: Mapping[str, torch.Tensor], state: State) -> tuple[Distribution, State]:
        """What to do next.

        Args:
            observations: by group [N, ...], on the policy's device.
            state: hidden state before this step.

        Returns:
            Distribution of the actions [N, A], and the state after the step.
        """
        features, own = self.actor.step(self.actor.observe(observations), state[: self._num_own])
        others: State = ()
        if self._critic is not None:
            others = _carry(self._critic, observations, state[self._num_own :])
        return self.actor.distribution(features), (*own, *others)

    @torch.inference_mode()
    def act(
        self, observations: Mapping[str, torch.Tensor], state: State, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor, State]:
        """Sample (or, greedy, take the most likely) actions.

        Args:
            observations: by group [N, ...], on the policy's device.
            state: hidden state before this step.
            generator: of the policy's device.

        Returns:
            Actions [N, A], float32 or int32, their log-probabilities float32 [N], and the state after the step.
        """
        distribution, state = self.distribution(observations, state)
        actions = distribution.mode() if self.greedy else distribution.sample(generator)
        logprobs = distribution.log_prob(actions)
        return (actions if self.action.kind == "continuous" else actions.int()), logprobs, state

    def load_weights(self, manifest: Manifest, data: memoryview) -> str:
        """Swap in a version; returns the checksum of what the networks hold, which is that of the manifest.

        Raises:
            WeightsError: names or shapes are not those of these networks (nothing has changed then), or what they hold
                is not what was published (nothing may be sampled then until a version is proven).
        """
        checksum = self._weights.load(manifest, data)
        if checksum != manifest.checksum:
            self.proven = False
            raise WeightsError(
                f"version {manifest.version}: the policy holds {checksum}, published was {manifest.checksum}; what "
                f"differs lies within {', '.join(self._weights.differing(manifest)[:5])}"
            )
        self.version, self.proven = manifest.version, True
        return checksum


def _carries_critic(config: ControlConfig) -> bool:
    """Whether the actor process must step the critic, too: its hidden state is part of a fragment."""
    return config.is_recurrent and config.policy.encoder == "separate" and config.algorithm.name == "ppo"


def _carry(critic: Critic, observations: Mapping[str, torch.Tensor], state: State) -> State:
    """State of the critic after a step; its values are computed by the learner, so no other layer is asked."""
    rnn = critic.encoder.rnn if critic.encoder is not None else None
    assert rnn is not None, "a critic that is carried is recurrent and has an encoder of its own"
    _, after = run_step(rnn, critic.normalizer(critic.observe(observations)), state)
    return after


def _published(actor: nn.Module, critic: nn.Module | None) -> nn.Module:
    """A module whose tensors have the names of the published ones: prefixed by the role where there are two."""
    return actor if critic is None else nn.ModuleDict({"policy": actor, "critic": critic})
