"""A student learns to do what a teacher would, on states that the student visits (rsl_rl's ``Distillation``).

    rollout ─┬─ observations.teacher ─► teacher (frozen, once a step) ─► its distribution ─┐
             └─ observations.actor ───► student (every update) ────────► its distribution ─┴─► imitation loss

Continuous actions: mean squared (or Huber) difference of the means, so the student's deviation is no part of it and
stays what it was: the noise with which it explores. Discrete actions: KL(teacher ‖ student), the cross-entropy to all
that the teacher says, less a constant. The teacher is state in the flat vector: ranks start from the same one and are
compared, and a checkpoint has it.

Ross et al. 2011, "A Reduction of Imitation Learning and Structured Prediction to No-Regret Online Learning",
arXiv:1011.0686: what the expert does in visited states is learned; here, in those of the newest batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from async_rl.config import ControlConfig
from async_rl.control.checkpoint import load_actor
from async_rl.control.distributions import Categorical, Distribution, Gaussian
from async_rl.control.networks import Actor, build_actor
from async_rl.control.normalizer import Normalizer
from async_rl.control.spaces import Action, Spaces
from async_rl.data import Group
from async_rl.errors import ConfigError
from async_rl.metrics import Metrics
from async_rl.shipped import find_shipped
from learner.control.agreement import Agreement, difference_sums
from learner.control.method import Batch, Memory, Sums, Totals
from learner.control.parts import inputs_of
from learner.control.rollout import Rollout, stack_fragments
from learner.control.splits import Share, filled, sizes, split_environments, split_samples, step_generator
from learner.control.start import hidden_state, in_chunks
from learner.control.step_sums import acting_facts, step_sums
from learner.control.tally import sum_together
from learner.control.transitions import join_groups
from learner.group import LearnerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One mini-batch on this rank."""

    count: int
    """Samples over all ranks; at least 1."""
    share: Share
    x: torch.Tensor
    """What the student reads: [m, D]; recurrent [T, n, D]."""
    teacher: Distribution
    """[m]: what the teacher would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationData:
    """What losses and :meth:`Distillation.finish` need of a step."""

    rollout: Rollout
    moments: torch.Tensor | None
    """Of the student's observations, over all ranks; None without a normaliser."""


class Distillation:
    """A :class:`learner.control.method.Method`.

    Args:
        config: of the run.
        spaces: of the environment.
        group: the ranks.

    Raises:
        ConfigError: the student does not fit the environment, or the teacher cannot be used in it.
    """

    def __init__(self, config: ControlConfig, spaces: Spaces, group: LearnerGroup) -> None:
        self._algorithm, self._seed = config.algorithm, config.seed
        self._group = group
        self._student: Actor = build_actor(config, spaces).to(group.device)
        self._teacher = load_teacher(config, spaces).to(group.device)
        self._teacher_groups = config.groups_of("teacher")
        self._agreement = Agreement(warns=group.rank == 0)
        self.modules: Mapping[str, nn.Module] = {"policy": self._student, "teacher": self._teacher}
        self.memories: Mapping[str, Memory] = {}
        self.published = ("policy",)
        self.sums = {"imitation": 1, "difference": 1, "samples": 1}

    def rates(self, lr: float, step: int) -> dict[str, float]:
        """The student's; the teacher has nothing that is trained."""
        return {"policy": lr, "teacher": 0.0}

    def clipped(self) -> tuple[str, ...]:
        """The student."""
        return ("policy",)

    @torch.no_grad()
    def prepare(self, groups: Sequence[Group], step: int) -> Batch:
        """What the teacher would have done, and mini-batches; one collective.

        Raises:
            AsyncRLError: actor and learner disagree about the log-probabilities of the same weights.
        """
        rollout = stack_fragments(groups, self._group.device)
        x = self._student.observe(rollout.obs)
        student = self._look(rollout, x)
        logprobs = student.log_prob(rollout.actions.flatten(0, 1)).view(rollout.acted.shape)
        states = join_groups(rollout.obs, self._teacher_groups).flatten(0, 1)
        teacher = self._teacher.distribution(in_chunks(self._teacher.features, states))
        shares = self._split(rollout.acted, step)
        parts = {
            "counts": sizes(shares),
            "difference": difference_sums(rollout, logprobs, step),
            "steps": step_sums(rollout, student, step),
        }
        if isinstance(self._student.normalizer, Normalizer):
            parts["moments"] = self._student.normalizer.moments(x, rollout.acted)
        totals = sum_together(self._group, parts)
        counts = filled(totals["counts"])
        return Batch(
            data=DistillationData(rollout=rollout, moments=totals.get("moments")),
            updates=[
                Part(count=max(1, int(count)), share=share, x=inputs_of(x, share), teacher=teacher[share.index])
                for share, count in zip(shares, counts, strict=True)
            ]
            * self._algorithm.epochs,
            amount=sum(counts),
            facts=self._agreement.judge(totals["difference"], step)
            | acting_facts(totals["steps"], has_noise=student.noise() is not None),
        )

    def loss(self, batch: Batch, part: Part) -> tuple[torch.Tensor, Sums]:
        """Σ imitation loss / samples of all ranks."""
        student = self._student.distribution(self._features(batch.data.rollout, part))
        loss = imitation_sum(student, part.teacher, self._algorithm.imitation) / part.count
        sums = {
            "imitation": loss.detach(),
            "difference": difference_sum(student.detach(), part.teacher),
            "samples": len(part.share.index),
        }
        return loss, sums

    @torch.no_grad()
    def finish(self, batch: Batch, step: int) -> None:
        """Let the student's normaliser take in the step's observations."""
        if isinstance(self._student.normalizer, Normalizer):
            self._student.normalizer.update(batch.data.moments.to(self._group.device))

    def metrics(self, totals: Totals, num_updates: int) -> Metrics:
        """Means over the updates: loss; |difference| of the mean actions, or the share of other most likely choices."""
        return {
            "loss/imitation": float(totals["imitation"]) / num_updates,
            "imitation/difference": float(totals["difference"]) / max(1.0, float(totals["samples"])),
        }

    def _look(self, rollout: Rollout, x: torch.Tensor) -> Distribution:
        """The student at the step's start, batch axis [T·N]."""
        if self._student.is_recurrent:
            features, _ = self._student.sequence(x, hidden_state(rollout, "actor"), rollout.resets)
            return self._student.distribution(features.flatten(0, 1))
        return self._student.distribution(in_chunks(self._student.features, x.flatten(0, 1)))

    def _split(self, acted: torch.Tensor, step: int) -> list[Share]:
        split = split_environments if self._student.is_recurrent else split_samples
        return split(acted, self._algorithm.minibatches, step_generator(self._seed, step, self._group.rank))

    def _features(self, rollout: Rollout, part: Part) -> torch.Tensor:
        """The student's features [m, F] at the present parameters."""
        envs, within = part.share.envs, part.share.within
        if envs is None or within is None:
            return self._student.features(part.x)
        state = tuple(array[:, envs] for array in hidden_state(rollout, "actor"))
        features, _ = self._student.sequence(part.x, state, rollout.resets[:, envs])
        return features.flatten(0, 1)[within]


def load_teacher(config: ControlConfig, spaces: Spaces) -> Actor:
    """The frozen actor of ``teacher.path``.

    Args:
        config: of the student's run.
        spaces: of the student's environment.

    Raises:
        ConfigError: there is no such checkpoint; the teacher reads other groups, or another number of observations,
            than ``observations.teacher`` has, has other actions, or is recurrent; or the setting of the loss has no
            effect.
    """
    path = config.teacher.path
    folder = find_shipped(path)
    if folder is None:
        raise ConfigError(f"teacher.path = {path!r}: there is no such folder; name the run folder of the teacher")
    teacher_config, teacher_spaces, teacher = load_actor(folder)
    if teacher_config.policy.network != "mlp":
        raise ConfigError(
            f"teacher.path = {path!r} is a policy with network {teacher_config.policy.network!r}: fragments carry no "
            "hidden state of a teacher, so it must be 'mlp'"
        )
    groups = config.groups_of("teacher")
    if groups != teacher.groups and (not config.observations.teacher or sorted(groups) == sorted(teacher.groups)):
        raise ConfigError(  # as many numbers, but others or in another order, would go unnoticed
            f"teacher.path = {path!r} reads the groups {list(teacher.groups)}, and here it would be given "
            f"{list(groups)}: set observations.teacher to the groups that hold what the teacher read, in its order"
        )
    wanted, offered = teacher_spaces.size_of(teacher.groups), spaces.size_of(groups)
    if wanted != offered:
        raise ConfigError(
            f"teacher.path = {path!r} reads {wanted} numbers ({', '.join(teacher.groups)} of its environment) and "
            f"observations.teacher = {list(groups)} has {offered}: name the groups that hold what the teacher read"
        )
    mine, theirs = spaces.action, teacher_spaces.action
    if (mine.kind, mine.size, mine.choices) != (theirs.kind, theirs.size, theirs.choices):
        raise ConfigError(
            f"teacher.path = {path!r} decides {_described(theirs)}, and this environment takes {_described(mine)}"
        )
    if mine.kind == "discrete" and config.algorithm.imitation != "mse":
        raise ConfigError(
            f"algorithm.imitation = {config.algorithm.imitation!r} has no effect with discrete actions, whose loss is "
            "KL(teacher ‖ student); remove it"
        )
    return teacher.requires_grad_(False)


def imitation_sum(student: Distribution, teacher: Distribution, kind: str) -> torch.Tensor:
    """How far the student is from the teacher, summed over samples, []. Pure.

    Gaussian: Σ mean_a (μ - μ_teacher)², or Huber's loss in place of the square (½ d² up to |d| = 1, |d| - ½ beyond).
    Categorical: Σ KL(teacher ‖ student).

    Args:
        student: [m], with a gradient.
        teacher: [m]
        kind: ``mse`` or ``huber``.
    """
    if isinstance(student, Gaussian) and isinstance(teacher, Gaussian):
        function = functional.mse_loss if kind == "mse" else functional.huber_loss
        return function(student.mean, teacher.mean, reduction="sum") / student.mean.shape[-1]
    assert isinstance(student, Categorical)
    assert isinstance(teacher, Categorical)
    return student.kl_from(teacher).sum()


def difference_sum(student: Distribution, teacher: Distribution) -> torch.Tensor:
    """Σ mean_a |μ - μ_teacher|, or the number of samples whose most likely choices are others, []. Pure."""
    difference = student.mode() - teacher.mode()
    if isinstance(student, Gaussian):
        return difference.abs().mean(-1).sum()
    return difference.ne(0).any(-1).sum()


def _described(action: Action) -> str:
    return f"{action.size} numbers" if action.kind == "continuous" else f"choices out of {list(action.choices)}"
