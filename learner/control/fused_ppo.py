"""PPO's loss and its gradient in one pass over blocks of a mini-batch, for feed-forward networks on a CPU.

block of x ─► actor ─► log π ─► surrogate, entropy ─► gradients of the actor ─┐
           ─► critic ─► V ─► value loss ─► gradients of the critic ───────────┴─► autograd, as one node
              (in a thread of its own: the two have nothing in common)

A block goes forward and back while it is in the cache, and the gradients of the losses are written by hand
(:mod:`learner.control.loss_gradients`); that is worth a third of an update's time. The numbers are those of the
modules with autograd, up to rounding.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import torch

from async_rl.config.control import ControlAlgorithmConfig
from async_rl.control.distributions import Gaussian
from async_rl.control.networks import Actor, Critic
from learner.control.fused import BLOCK, FusedMlp, fuse
from learner.control.loss_gradients import CategoricalGradient, GaussianGradient, surrogate_gradient, value_gradient
from learner.control.parts import Part

_DEADLINE_S = 600.0
"""Longest time for one network's part of a mini-batch."""


def fuse_ppo(actor: Actor, critic: Critic, algorithm: ControlAlgorithmConfig) -> FusedPpo | None:
    """The two networks fused; None where that is not possible or does not gain, see :func:`fuse`."""
    fused_actor, fused_critic = fuse(actor), fuse(critic)
    if fused_actor is None or fused_critic is None:
        return None
    if actor.action.kind == "continuous" and actor.head.out_features != actor.action.size:
        return None  # the deviation depends on the state
    return FusedPpo(actor, fused_actor, fused_critic, algorithm)


class FusedPpo:
    """Actor and critic under PPO's loss.

    Args:
        actor: whose distribution it is; its deviation, where it has one, does not depend on the state.
        fused_actor: the same.
        fused_critic: beside it.
        algorithm: clips and coefficients.
    """

    def __init__(
        self, actor: Actor, fused_actor: FusedMlp, fused_critic: FusedMlp, algorithm: ControlAlgorithmConfig
    ) -> None:
        self._actor = actor
        self.actor, self.critic = fused_actor, fused_critic
        self.algorithm = algorithm
        self._hidden = fused_actor.new_hidden(), fused_critic.new_hidden()
        self.beside = ThreadPoolExecutor(1, "critic")

    def __call__(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs of the actor's head [m, O], values [m], and a loss [] that has the gradient and the value 0.

        Only the last has a gradient. What the losses are worth is told by :mod:`learner.control.losses`.
        """
        count = len(part.actor_x)
        out = part.actor_x.new_empty(count, self.actor.linears[-1].out_features)
        values = part.actor_x.new_empty(count, 1)
        distribution = self._actor.distribution_of(out[:0])
        std = distribution.std if isinstance(distribution, Gaussian) else None
        loss: torch.Tensor = _Loss.apply(self, part, out, values, std, *self.actor.parameters, *self.critic.parameters)
        return out, values.squeeze(-1), loss

    def actor_gradients(
        self, part: Part, out: torch.Tensor, std: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Fill ``out``; gradients of the deviation and of all parameters."""
        samples, algorithm = part.samples, self.algorithm
        share, entropy = 1 / part.count, -algorithm.entropy_coef / part.count
        head = CategoricalGradient(self._actor.action.choices) if std is None else GaussianGradient(std)
        gradients = self.actor.new_gradients()
        per_sample = (samples.actions, samples.old_logprobs, samples.advantages)
        blocks = zip(*(array.split(BLOCK) for array in (part.actor_x, out, *per_sample)), strict=True)
        all_weights = repeat(None) if samples.weights is None else samples.weights.split(BLOCK)
        for (x, outs, actions, old_logprobs, advantages), weights in zip(blocks, all_weights, strict=False):
            inputs = self.actor.forward(x, self._hidden[0], outs)
            log_ratios = head.log_prob(outs, actions).sub_(old_logprobs)
            g = surrogate_gradient(log_ratios, advantages, algorithm.clip, weights).mul_(share)
            self.actor.backward(head.backward(actions, g, entropy), inputs, gradients)
        of_std = head.std(len(out), entropy) if isinstance(head, GaussianGradient) else None
        return of_std, [tensor for layer in gradients for tensor in (layer.weight, layer.bias)]

    @torch.no_grad()
    def critic_gradients(self, part: Part, values: torch.Tensor) -> list[torch.Tensor]:
        """Fill ``values`` [m, 1]; gradients of all parameters."""
        samples, clip = part.samples, self.algorithm.value_clip
        share = self.algorithm.value_coef / part.count
        gradients = self.critic.new_gradients()
        arrays = (part.critic_x, values, samples.values, samples.returns)
        for x, outs, old_values, returns in zip(*(array.split(BLOCK) for array in arrays), strict=True):
            inputs = self.critic.forward(x, self._hidden[1], outs)
            g = value_gradient(outs.squeeze(-1), old_values, returns, clip).mul_(share)
            self.critic.backward(g.unsqueeze(-1), inputs, gradients)
        return [tensor for layer in gradients for tensor in (layer.weight, layer.bias)]


class _Loss(torch.autograd.Function):
    """Makes all gradients in the forward pass and hands them out in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        fused: FusedPpo,
        part: Part,
        out: torch.Tensor,
        values: torch.Tensor,
        std: torch.Tensor | None,
        *_: torch.Tensor,
    ) -> torch.Tensor:
        of_critic = fused.beside.submit(fused.critic_gradients, part, values)
        of_std, of_actor = fused.actor_gradients(part, out, std)
        ctx.gradients = of_std, *of_actor, *of_critic.result(_DEADLINE_S)
        return out.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, None, *(None if g is None else g * scale for g in ctx.gradients)
