"""The mini-batches of a step on this rank, gathered once: all epochs read the same memory.

[T, N, ...] ─► index of each share ─► Part [m, ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from async_rl.control.distributions import Distribution
from learner.control.splits import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What PPO's loss reads of a sample; as a step's whole the batch axis is [T·N], as a mini-batch's [m]."""

    actions: torch.Tensor
    """[.., A]"""
    old_logprobs: torch.Tensor
    """[..]: of the policy that the ratio is taken to."""
    weights: torch.Tensor | None
    """[..]: of the samples; None: 1."""
    old: Distribution
    """[..]: of the step's start."""
    advantages: torch.Tensor
    """[..], normalised over all ranks."""
    values: torch.Tensor
    """[..], of the step's start."""
    returns: torch.Tensor
    """[..]"""

    def __getitem__(self, index: torch.Tensor) -> Samples:
        """Some of them."""
        return Samples(
            actions=self.actions[index],
            old_logprobs=self.old_logprobs[index],
            weights=None if self.weights is None else self.weights[index],
            old=self.old[index],
            advantages=self.advantages[index],
            values=self.values[index],
            returns=self.returns[index],
        )

    def repeated(self, times: int) -> Samples:
        """The same for mirror images: all of them, ``times`` times; ``actions`` and ``old`` are left alone."""
        if times == 1:
            return self
        return Samples(
            actions=self.actions,
            old_logprobs=self.old_logprobs.repeat(times),
            weights=None if self.weights is None else self.weights.repeat(times),
            old=self.old,
            advantages=self.advantages.repeat(times),
            values=self.values.repeat(times),
            returns=self.returns.repeat(times),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One mini-batch on this rank."""

    count: int
    """Samples over all ranks, at least 1."""
    share: Share
    samples: Samples
    actor_x: torch.Tensor
    """What the actor reads: [m, D]; recurrent [T, n, D]."""
    critic_x: torch.Tensor
    """What the critic reads; the same memory where they read the same groups."""


def make_parts(
    shares: Sequence[Share],
    counts: Sequence[float],
    samples: Samples,
    actor_x: torch.Tensor,
    critic_x: torch.Tensor,
) -> list[Part]:
    """Gather the mini-batches.

    Args:
        shares: of this rank.
        counts: samples of each over all ranks.
        samples: of the whole step [T·N].
        actor_x: [T, N, D]
        critic_x: the same, or the very same tensor.
    """
    parts = []
    for share, count in zip(shares, counts, strict=True):
        x = inputs_of(actor_x, share)
        parts.append(
            Part(
                count=max(1, int(count)),
                share=share,
                samples=samples[share.index],
                actor_x=x,
                critic_x=x if critic_x is actor_x else inputs_of(critic_x, share),
            )
        )
    return parts


def inputs_of(x: torch.Tensor, share: Share) -> torch.Tensor:
    """What a network reads of x [T, N, D] in one mini-batch: [m, D], or whole environments [T, n, D]."""
    return x.flatten(0, 1)[share.index] if share.envs is None else x[:, share.envs]
