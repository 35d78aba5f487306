"""Policy and critic over a mini-batch at the present parameters, with gradients: the fastest way for each kind.

Part ─┬─► feed-forward on a CPU: losses and gradients at once (fused_ppo.py) ─► Evaluated with ``loss``
      ├─► feed-forward otherwise: the modules, on normalised x ─────────────────► Evaluated
      ├─► recurrent: whole environments through time ───────────────────────────► Evaluated
      └─► symmetry.augment: samples and their mirror images ────────────────────► Evaluated [k·m]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from async_rl.config.control import ControlAlgorithmConfig
from async_rl.control.distributions import Distribution
from async_rl.control.networks import Actor, Critic
from learner.control.fused_ppo import FusedPpo, fuse_ppo
from learner.control.parts import Part
from learner.control.rollout import Rollout
from learner.control.splits import Share
from learner.control.start import hidden_state

if TYPE_CHECKING:
    from learner.control.symmetry import Symmetry


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What the networks say of a mini-batch of m samples, and of k - 1 mirror images of each behind them."""

    distribution: Distribution
    """[k·m]"""
    values: torch.Tensor
    """[k·m]"""
    actions: torch.Tensor
    """[k·m, A]"""
    images: int
    """k"""
    loss: torch.Tensor | None = None
    """Fused: carries the gradient of all of PPO's losses; ``distribution`` and ``values`` have none then."""


class Evaluator:
    """Runs the networks.

    Args:
        actor: the policy.
        critic: beside it.
        symmetry: whose mirror images are trained on, too; None: only the samples themselves.
        algorithm: the losses, for the fused way.
    """

    def __init__(
        self, actor: Actor, critic: Critic, symmetry: Symmetry | None, algorithm: ControlAlgorithmConfig
    ) -> None:
        self._actor = actor
        self._critic = critic
        self._symmetry = symmetry
        self._fused = fuse_ppo(actor, critic, algorithm) if symmetry is None else None

    def inputs(self, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
        """What :class:`Part` holds of the observations, for actor and critic; the same tensor if they read the same.

        Normalised already, but for recurrent networks: running statistics stay as they are during a step.
        """
        actor_x = self._input(self._actor, rollout)
        if self._critic.shared:
            return actor_x, actor_x
        alike = self._actor.groups == self._critic.groups and isinstance(self._actor.normalizer, torch.nn.Identity)
        return actor_x, actor_x if alike else self._input(self._critic, rollout)

    def __call__(self, rollout: Rollout, part: Part) -> Evaluated:
        """Evaluate a mini-batch."""
        if self._symmetry is not None:
            return self._mirrored(self._symmetry, rollout, part)
        if self._fused is not None:
            return self._at_once(self._fused, part)
        features = self._features(self._actor, rollout, part, part.actor_x, "actor")
        shared = self._critic.shared
        read = features if shared else self._features(self._critic, rollout, part, part.critic_x, "critic")
        distribution, values = self._actor.distribution(features), self._critic.value(read)
        return Evaluated(distribution=distribution, values=values, actions=part.samples.actions, images=1)

    def _at_once(self, fused: FusedPpo, part: Part) -> Evaluated:
        out, values, loss = fused(part)
        with torch.no_grad():
            distribution = self._actor.distribution_of(out)
        return Evaluated(distribution=distribution, values=values, actions=part.samples.actions, images=1, loss=loss)

    def _input(self, network: Actor | Critic, rollout: Rollout) -> torch.Tensor:
        x = network.observe(rollout.obs)
        if self._actor.is_recurrent:
            return x
        normalized: torch.Tensor = network.normalizer(x)
        return normalized

    def _features(
        self, network: Actor | Critic, rollout: Rollout, part: Part, x: torch.Tensor, name: str
    ) -> torch.Tensor:
        assert network.encoder is not None
        share = part.share
        if share.envs is None or share.within is None:
            features: torch.Tensor = network.encoder.mlp(x)
            return features
        state = tuple(array[:, share.envs] for array in hidden_state(rollout, name))
        features, _ = network.sequence(x, state, rollout.resets[:, share.envs])
        return features.flatten(0, 1)[share.within]

    def _mirrored(self, symmetry: Symmetry, rollout: Rollout, part: Part) -> Evaluated:
        obs, actions = symmetry.augment(observations_of(rollout, part.share), part.samples.actions)
        features = self._actor.features(self._actor.observe(obs))
        read = features if self._critic.shared else self._critic.features(self._critic.observe(obs))
        return Evaluated(
            distribution=self._actor.distribution(features),
            values=self._critic.value(read),
            actions=actions,
            images=symmetry.images,
        )


def observations_of(rollout: Rollout, share: Share) -> dict[str, torch.Tensor]:
    """Observation groups of some samples [m, ...]."""
    return {name: array.flatten(0, 1)[share.index] for name, array in rollout.obs.items()}
