"""What a policy's head says about the next action: a diagonal Gaussian, or one categorical choice per part.

head [.., O] ─► Distribution ─► sample, mode [.., A] · log_prob, entropy, kl_from [..]

Plain arithmetic on few tensors: these run in the innermost loop of actors and learner. Nothing here is squashed or
clipped; the environment clips continuous actions to its bounds.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_IMPOSSIBLE = -1e9
"""Logit of the padding behind parts with fewer choices: its probability is 0, and 0 times its logarithm stays 0."""
_FEW = 15
"""Choices below which the softmax is taken across rows."""


class Gaussian:
    """Independent normal distributions of the A numbers of an action.

    Args:
        mean: float32 [.., A]
        std: float32 [A] where it does not depend on the state, else [.., A]; positive.
    """

    __slots__ = ("mean", "std")

    def __init__(self, mean: torch.Tensor, std: torch.Tensor) -> None:
        self.mean = mean
        self.std = std

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """Mean [.., A] and deviation [A] or [.., A]."""
        return self.mean, self.std

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Actions float32 [.., A], without a gradient."""
        noise = torch.empty_like(self.mean, requires_grad=False).normal_(generator=generator)
        return noise.mul_(self.std.detach()).add_(self.mean.detach())

    def mode(self) -> torch.Tensor:
        """The most likely action [.., A]: the mean."""
        return self.mean

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        """Log density [..] of actions [.., A]."""
        z = (actions - self.mean) / self.std
        constant = self.std.log().sum(-1) + self.mean.shape[-1] * _LOG_SQRT_2PI
        return z.square().sum(-1) * -0.5 - constant

    def log_prob_parts(self, actions: torch.Tensor) -> torch.Tensor:
        """Log density [.., A] of each number of actions [.., A]."""
        z = (actions - self.mean) / self.std
        return z.square() * -0.5 - (self.std.log() + _LOG_SQRT_2PI)

    def entropy(self) -> torch.Tensor:
        """In nats [..]: Σ log σ + (1 + log 2π) / 2."""
        total = self.std.log().sum(-1) + self.mean.shape[-1] * (0.5 + _LOG_SQRT_2PI)
        return total.expand(self.mean.shape[:-1])

    def kl_from(self, old: Gaussian) -> torch.Tensor:
        """KL(old ‖ self) [..]: Σ log(σ / σ_old) + (σ_old² + (μ_old − μ)²) / 2σ² − 1/2."""
        ratio = old.std / self.std
        shift = (old.mean - self.mean) / self.std
        spread = ratio.square().mul(0.5).sub(ratio.log()).sum(-1) - 0.5 * self.mean.shape[-1]
        return shift.square().sum(-1) * 0.5 + spread

    def noise(self) -> torch.Tensor:
        """Mean deviation, a tensor []."""
        return self.std.mean()

    def detach(self) -> Gaussian:
        """The same without gradients."""
        return Gaussian(self.mean.detach(), self.std.detach())

    def flatten(self) -> Gaussian:
        """One batch axis: mean [B, A]."""
        size = self.mean.shape[-1]
        std = self.std if self.std.ndim == 1 else self.std.reshape(-1, size)
        return Gaussian(self.mean.reshape(-1, size), std)

    def __getitem__(self, index: Any) -> Gaussian:
        """Some of the batch, indexed as a tensor over the batch axes."""
        return Gaussian(self.mean[index], self.std if self.std.ndim == 1 else self.std[index])


class Categorical:
    """Independent choices: part i of an action is one of ``choices[i]``.

    Args:
        logits: float32 [.., sum(choices)], those of part 0 first.
        choices: number of choices of each of the A parts.
    """

    __slots__ = ("choices", "log_probs")

    def __init__(self, logits: torch.Tensor, choices: tuple[int, ...]) -> None:
        self.choices = choices
        self.log_probs = log_softmax(_stack_parts(logits, choices))
        """[.., A, C] with C = max(choices)."""

    @classmethod
    def _of(cls, log_probs: torch.Tensor, choices: tuple[int, ...]) -> Categorical:
        made = cls.__new__(cls)
        made.choices = choices
        made.log_probs = log_probs
        return made

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """Normalised logits [.., sum(choices)]."""
        if len(set(self.choices)) == 1:
            return (self.log_probs.flatten(-2),)
        parts = [self.log_probs[..., part, :count] for part, count in enumerate(self.choices)]
        return (torch.cat(parts, -1),)

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Actions int64 [.., A], by inversion of the distribution function.

        The uniform number is scaled by the sum of the probabilities, so that rounding never picks an impossible choice.
        """
        cumulated = self.log_probs.detach().exp().cumsum(-1)
        uniform = torch.rand(
            (*cumulated.shape[:-1], 1), generator=generator, dtype=cumulated.dtype, device=cumulated.device
        )
        return torch.searchsorted(cumulated, uniform.mul_(cumulated[..., -1:]), right=True).squeeze(-1)

    def mode(self) -> torch.Tensor:
        """The most likely choices, int64 [.., A]."""
        return self.log_probs.argmax(-1)

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        """Log probability [..] of actions, int64 [.., A]."""
        return self.log_prob_parts(actions).sum(-1)

    def log_prob_parts(self, actions: torch.Tensor) -> torch.Tensor:
        """Log probability [.., A] of each part of actions, int64 [.., A]."""
        return self.log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> torch.Tensor:
        """In nats, summed over the parts [..]."""
        return -(self.log_probs.exp() * self.log_probs).sum((-2, -1))

    def kl_from(self, old: Categorical) -> torch.Tensor:
        """KL(old ‖ self), summed over the parts [..]."""
        return (old.log_probs.exp() * (old.log_probs - self.log_probs)).sum((-2, -1))

    def noise(self) -> None:
        """None: there is no deviation."""

    def detach(self) -> Categorical:
        """The same without gradients."""
        return Categorical._of(self.log_probs.detach(), self.choices)

    def flatten(self) -> Categorical:
        """One batch axis."""
        return Categorical._of(self.log_probs.reshape(-1, *self.log_probs.shape[-2:]), self.choices)

    def __getitem__(self, index: Any) -> Categorical:
        """Some of the batch, indexed as a tensor over the batch axes."""
        return Categorical._of(self.log_probs[index], self.choices)


Distribution = Gaussian | Categorical


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Over the last axis; over few choices ten times as fast as torch's own, which takes one row at a time."""
    if logits.shape[-1] > _FEW:
        return functional.log_softmax(logits, -1)
    return functional.log_softmax(logits.movedim(-1, 0), 0).movedim(0, -1)


def _stack_parts(logits: torch.Tensor, choices: tuple[int, ...]) -> torch.Tensor:
    """[.., sum(choices)] to [.., A, max(choices)]; shorter parts are filled up with impossible choices."""
    longest = max(choices)
    if min(choices) == longest:
        return logits.unflatten(-1, (len(choices), longest))
    parts = [
        functional.pad(part, (0, longest - part.shape[-1]), value=_IMPOSSIBLE) for part in logits.split(choices, -1)
    ]
    return torch.stack(parts, -2)
