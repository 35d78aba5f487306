"""Gradients of PPO's losses with respect to what the networks put out, by hand: a few operations per block.

head's outputs [b, O] ─► log π ─► surrogate ─► its gradient ─► gradient of the outputs [b, O]
values [b] ─► clipped loss ─► gradient [b]

Each is the derivative of the function of the same name in :mod:`learner.control.losses` and of the distribution's
entropy; a test compares them with autograd.
"""

from __future__ import annotations

import math

import torch

from async_rl.control.distributions import log_softmax
from learner.algorithms.ratio import MAX_LOG_RATIO


def surrogate_gradient(
    log_ratios: torch.Tensor, advantages: torch.Tensor, clip: float, weights: torch.Tensor | None
) -> torch.Tensor:
    """Derivative [b] of ``surrogate_sum`` by the log-ratios: -w A r where the unclipped term is the smaller, else 0."""
    ratios = log_ratios.clamp(max=MAX_LOG_RATIO).exp_()
    gains = ratios * advantages
    active = (gains <= ratios.clamp_(1 - clip, 1 + clip).mul_(advantages)).logical_and_(log_ratios <= MAX_LOG_RATIO)
    gradient = gains.neg_().mul_(active)
    return gradient if weights is None else gradient.mul_(weights)


def value_gradient(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """Derivative [b] of ``value_sum`` by the values: of the larger square; 0 where that is a clipped one."""
    errors = values - returns
    if clip == 0:
        return errors.mul_(2)
    moves = values - old_values
    clipped = moves.clamp(-clip, clip)
    inside = moves == clipped
    bounded = clipped.add_(old_values).sub_(returns)
    return torch.where(bounded.abs() > errors.abs(), bounded * inside, errors).mul_(2)


class GaussianGradient:
    """Of independent normal distributions whose deviation does not depend on the state.

    Args:
        std: σ [A], without gradient.
    """

    def __init__(self, std: torch.Tensor) -> None:
        self._inverse = 1 / std
        self._constant = std.log().sum() + 0.5 * len(std) * math.log(2 * math.pi)
        self._squares = torch.zeros_like(std)
        self._total = std.new_zeros(())
        self._z = std

    def log_prob(self, out: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Log density [b] of actions [b, A], means ``out`` [b, A]."""
        self._z = torch.sub(actions, out).mul_(self._inverse)
        return self._z.square().sum(-1).mul_(-0.5).sub_(self._constant)

    def backward(self, actions: torch.Tensor, g: torch.Tensor, entropy: float) -> torch.Tensor:
        """Gradient of the means [b, A], given g [b] of the log densities of the call before; the entropy has none.

        The deviation's is kept for :meth:`std`.
        """
        self._squares.addmv_(self._z.square().t(), g)
        self._total.add_(g.sum())
        return self._z.mul_(g.unsqueeze(-1)).mul_(self._inverse)

    def std(self, samples: float, entropy: float) -> torch.Tensor:
        """Gradient [A] of σ over all blocks: Σ g (z² - 1) / σ, and of ``entropy`` · samples · Σ log σ."""
        return (self._squares - self._total + entropy * samples) * self._inverse


class CategoricalGradient:
    """Of independent choices.

    Args:
        choices: of each part of an action.
    """

    def __init__(self, choices: tuple[int, ...]) -> None:
        self._choices = choices
        self._log_probs: list[torch.Tensor] = []

    def log_prob(self, out: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Log probability [b] of actions int64 [b, A], logits ``out`` [b, sum(choices)]."""
        self._log_probs = [log_softmax(part) for part in out.split(self._choices, -1)]
        chosen = [part.gather(-1, actions[:, i : i + 1]) for i, part in enumerate(self._log_probs)]
        return chosen[0].squeeze(-1) if len(chosen) == 1 else torch.cat(chosen, -1).sum(-1)

    def backward(self, actions: torch.Tensor, g: torch.Tensor, entropy: float) -> torch.Tensor:
        """Gradient of the logits, given g [b] of the log probabilities of the call before, ``entropy`` of each entropy.

        d log p_a / d logit_j = 1[j = a] - p_j        dH / d logit_j = -p_j (log p_j + H)
        """
        g = g.unsqueeze(-1)
        gradients = []
        for i, log_probs in enumerate(self._log_probs):
            probs = log_probs.exp()
            if entropy:
                negative = (probs * log_probs).sum(-1, keepdim=True)  # -H
                gradient = log_probs.sub_(negative).mul_(-entropy).sub_(g).mul_(probs)
            else:
                gradient = probs.mul_(-g)
            gradients.append(gradient.scatter_add_(-1, actions[:, i : i + 1], g))
        return gradients[0] if len(gradients) == 1 else torch.cat(gradients, -1)
