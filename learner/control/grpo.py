"""GRPO for episodes: no critic; an episode is as good as it did better than others from the same start.

groups of G episodes ─► advantages within each group ─► log-probabilities at the step's start ─► random split
  ─► one collective: counts, rewards, running statistics ─► Batch
  ─► epochs × mini-batches: clipped surrogate over the parts of actions - entropy ─► normaliser

The recipe is that of language models with action tokens in place of words (Shao et al. 2024, arXiv:2402.03300; for
vision-language-action policies Li et al. 2025, arXiv:2509.09674): every part of every action of an episode gets the
episode's advantage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from async_rl.config import ControlConfig
from async_rl.control.fragment import OBS
from async_rl.control.networks import Actor, build_actor
from async_rl.control.normalizer import Normalizer
from async_rl.control.spaces import Spaces
from async_rl.data import Group
from async_rl.metrics import Metrics
from learner.algorithms.group_relative import group_advantages
from learner.algorithms.kl import kl_estimate
from learner.algorithms.ppo import ppo_loss
from learner.control.agreement import Agreement
from learner.control.demonstrations import imitate
from learner.control.judging import Inputs, judge, judge_all, rows_of
from learner.control.method import Batch, Memory, Sums, Totals
from learner.control.splits import filled, sizes, split_samples, step_generator
from learner.control.tally import sum_together
from learner.group import LearnerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Steps of the episodes of this rank, one behind the other; as a step's whole S of them, as a mini-batch m."""

    x: Inputs
    actions: torch.Tensor
    """[S, A], float32 or int64."""
    behaviour: torch.Tensor
    """[S, A]: log-probabilities of each part, of the policy that acted."""
    start: torch.Tensor
    """[S, A]: the same, of the policy of the step's start."""
    versions: torch.Tensor
    """int32 [S, A]"""
    advantages: torch.Tensor
    """[S]: of the episode that the step belongs to."""

    def __getitem__(self, index: torch.Tensor) -> Samples:
        """Some of them."""
        return Samples(
            x=rows_of(self.x, index),
            actions=self.actions[index],
            behaviour=self.behaviour[index],
            start=self.start[index],
            versions=self.versions[index],
            advantages=self.advantages[index],
        )


@dataclass(frozen=True, slots=True)
class Part:
    """One mini-batch on this rank."""

    samples: Samples
    count: int
    """Samples over all ranks, at least 1."""


class Grpo:
    """A :class:`learner.control.method.Method`.

    Args:
        config: of the run.
        spaces: of the environment.
        group: the ranks.
        fresh: the policy begins here, with demonstrations if there are any; else a checkpoint will fill it.

    Raises:
        ConfigError: the network does not fit the environment, or there are no such demonstrations.
    """

    def __init__(self, config: ControlConfig, spaces: Spaces, group: LearnerGroup, *, fresh: bool = True) -> None:
        self._algorithm, self._seed, self._group = config.algorithm, config.seed, group
        self._actor: Actor = build_actor(config, spaces).to(group.device)
        if fresh and config.episodes.demonstrations:
            imitate(self._actor, config, spaces)
        self._agreement = Agreement(warns=group.rank == 0)
        self.modules: Mapping[str, nn.Module] = {"policy": self._actor}
        self.memories: Mapping[str, Memory] = {}
        self.published = ("policy",)
        self.sums = dict.fromkeys(("kl", "samples", "policy", "entropy", "clipped"), 1)

    def rates(self, lr: float, step: int) -> dict[str, float]:
        """The schedule's."""
        return {"policy": lr}

    def clipped(self) -> tuple[str, ...]:
        """The policy."""
        return ("policy",)

    @torch.no_grad()
    def prepare(self, groups: Sequence[Group], step: int) -> Batch:
        """Advantages, log-probabilities at the step's start and mini-batches of this rank's groups; one collective.

        Raises:
            AsyncRLError: actor and learner disagree about the log-probabilities of the same weights.
        """
        samples = self._gather(groups)
        generator = step_generator(self._seed, step, self._group.rank)
        everything = torch.ones(len(samples.advantages), 1, dtype=torch.bool, device=self._group.device)
        shares = split_samples(everything, self._algorithm.minibatches, generator)
        normalizer = self._normalizer
        totals = sum_together(
            self._group,
            {
                "counts": sizes(shares),
                "difference": _differences(samples, step),
                "rewards": _reward_sums(groups),
                "ages": (step - samples.versions).sum(),
                "moments": normalizer.moments(samples.x) if normalizer is not None else torch.zeros(0),
            },
        )
        amount = float(totals["counts"].sum())
        parts = [
            Part(samples[share.index], max(1, int(count)))
            for share, count in zip(shares, filled(totals["counts"]), strict=True)
        ]
        return Batch(
            data=totals["moments"],
            updates=parts * self._algorithm.epochs,
            amount=amount,
            facts=self._agreement.judge(totals["difference"], step)
            | _reward_facts(totals["rewards"])
            | {"age/mean": float(totals["ages"]) / max(1.0, amount * samples.actions.shape[1])},
        )

    def loss(self, batch: Batch, part: Part) -> tuple[torch.Tensor, Sums]:
        """Σ surrogate - entropy_coef Σ entropy over the parts of all actions, divided by their number over all ranks.

        The KL is that to the step's start, estimated from the actions that were taken (k3, summed over an action's
        parts): a product of conditional distributions has no closed form that one pass could compute.
        """
        samples, algorithm = part.samples, self._algorithm
        logprobs, entropies = judge(self._actor, samples.x, samples.actions)
        decoupled = algorithm.proximal == "recomputed"
        base = samples.start if decoupled else samples.behaviour
        advantages = samples.advantages.unsqueeze(1).expand_as(base)
        losses, cut = ppo_loss(logprobs, base, advantages, algorithm.clip, algorithm.clip)
        if decoupled:
            losses = losses * (samples.start - samples.behaviour).exp().clamp(max=algorithm.weight_max)
        share = 1 / (part.count * samples.actions.shape[1])
        policy, entropy = losses.sum() * share, entropies.sum() * share
        with torch.no_grad():
            sums: dict[str, torch.Tensor | float] = {
                "kl": kl_estimate("k3", samples.start, logprobs).sum(),
                "samples": float(len(samples.advantages)),
                "policy": policy.detach(),
                "entropy": entropy.detach(),
                "clipped": cut.sum() * share,
            }
        return policy - algorithm.entropy_coef * entropy, sums

    @torch.no_grad()
    def finish(self, batch: Batch, step: int) -> None:
        """Let the normaliser take in the step's observations."""
        normalizer = self._normalizer
        if normalizer is not None:
            normalizer.update(batch.data.to(self._group.device))

    def metrics(self, totals: Totals, num_updates: int) -> Metrics:
        """Means over the updates of the step; ``entropy`` is of one part of an action."""
        return {
            "loss/policy": float(totals["policy"]) / num_updates,
            "entropy": float(totals["entropy"]) / num_updates,
            "kl": float(totals["kl"]) / max(1.0, float(totals["samples"])),
            "clip_fraction": float(totals["clipped"]) / num_updates,
        }

    @property
    def _normalizer(self) -> Normalizer | None:
        found = self._actor.normalizer
        return found if isinstance(found, Normalizer) else None

    def _gather(self, groups: Sequence[Group]) -> Samples:
        """All steps of this rank's episodes, with what they are judged by."""
        device = self._group.device

        def whole(name: str) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([group.arrays[name] for group in groups])).to(device)

        actions = whole("actions")
        actions = actions if actions.dtype == torch.float32 else actions.long()
        x = self._actor.observe({name: whole(OBS + name) for name in self._actor.groups})
        return Samples(
            x=x,
            actions=actions,
            behaviour=whole("logprobs"),
            start=judge_all(self._actor, x, actions),
            versions=whole("versions"),
            advantages=_advantages(groups).to(device),
        )


def _advantages(groups: Sequence[Group]) -> torch.Tensor:
    """Advantage of each step [S]: that of its episode within its group."""
    rewards = torch.cat([torch.tensor(group.rewards) for group in groups])
    index = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(group) for group in groups]))
    lengths = torch.tensor([length for group in groups for length in group.lengths])
    return group_advantages(rewards, index, normalize_std=True).repeat_interleave(lengths)


def _differences(samples: Samples, step: int) -> torch.Tensor:
    """Σ |log-probability difference| and count of the parts that version ``step`` chose, then of older ones: [4]."""
    fresh = samples.versions == step
    difference = (samples.start - samples.behaviour).abs()
    return torch.stack([(difference * fresh).sum(), fresh.sum(), (difference * ~fresh).sum(), (~fresh).sum()]).double()


def _reward_sums(groups: Sequence[Group]) -> torch.Tensor:
    """Episodes, sum and sum of squares of their rewards, groups, and those whose rewards differ: float64 [5]."""
    rewards = torch.cat([torch.tensor(group.rewards) for group in groups]).double()
    varied = sum(bool((group.rewards != group.rewards[0]).any()) for group in groups)
    numbers = (len(rewards), float(rewards.sum()), float(rewards.square().sum()), len(groups), varied)
    return torch.tensor(numbers, dtype=torch.float64)


def _reward_facts(totals: torch.Tensor) -> Metrics:
    """``reward/*`` are of whole episodes, as they were judged; ``groups/varied`` is the share that teaches."""
    episodes, total, squares, groups, varied = totals.tolist()
    mean = total / max(1.0, episodes)
    return {
        "reward/mean": mean,
        "reward/std": max(0.0, squares / max(1.0, episodes) - mean**2) ** 0.5,
        "groups/varied": varied / max(1.0, groups),
    }
