"""PPO with a critic, as rsl_rl has it, for fragments of any age; RND, AMP and symmetry join it here.

fragments ─► look (policy and critic once) ─► extensions' rewards ─► GAE │ V-trace ─► random split
  ─► one collective: moments of the advantages, counts, running statistics ─► Batch
  ─► epochs × mini-batches: surrogate + value loss - entropy (+ mirror loss, + extensions) ─► normalisers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from async_rl.config import ControlConfig
from async_rl.control.networks import Actor, Critic, build_actor, build_critic
from async_rl.control.normalizer import Normalizer
from async_rl.control.spaces import Spaces
from async_rl.data import Group
from async_rl.metrics import Metrics
from learner.control.agreement import Agreement, difference_sums
from learner.control.evaluate import Evaluated, Evaluator, observations_of
from learner.control.extension import Extension
from learner.control.losses import surrogate_sum, value_sum
from learner.control.method import Batch, Memory, Sums, Totals
from learner.control.parts import Part, Samples, make_parts
from learner.control.returns import generalized_advantages, vtrace
from learner.control.rollout import Rollout, stack_fragments
from learner.control.splits import Share, filled, sizes, split_environments, split_samples, step_generator
from learner.control.start import StepStart, look
from learner.control.step_sums import fit, moments, normalized, step_facts, step_sums
from learner.control.tally import sum_together
from learner.group import LearnerGroup

if TYPE_CHECKING:
    from learner.control.symmetry import Symmetry


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoData:
    """What :meth:`Ppo.finish` needs of a step."""

    rollout: Rollout
    moments: Mapping[str, torch.Tensor]
    """Of the observations, over all ranks, by role of the normaliser."""


class Ppo:
    """A :class:`learner.control.method.Method`.

    Args:
        config: of the run.
        spaces: of the environment.
        group: the ranks.

    Raises:
        ConfigError: the networks do not fit the environment, or an extension cannot be made.
    """

    def __init__(self, config: ControlConfig, spaces: Spaces, group: LearnerGroup) -> None:
        self._config = config
        self._algorithm = config.algorithm
        self._group = group
        self._actor: Actor = build_actor(config, spaces).to(group.device)
        self._critic: Critic = build_critic(config, spaces, self._actor).to(group.device)
        self._extensions = _make_extensions(config, spaces, group)
        self._symmetry = _make_symmetry(config, spaces)
        augments = self._symmetry is not None and self._symmetry.augments
        self._evaluator = Evaluator(self._actor, self._critic, self._symmetry if augments else None, self._algorithm)
        self._agreement = Agreement(warns=group.rank == 0)
        self.modules: Mapping[str, nn.Module] = {"policy": self._actor, "critic": self._critic}
        self.memories: Mapping[str, Memory] = {}
        self.sums = dict.fromkeys(("kl", "samples", "policy", "value", "entropy", "mirror", "clipped"), 1)
        for extension in self._extensions:
            self.modules = {**self.modules, **extension.modules}
            self.memories = {**self.memories, **extension.memories}
            self.sums |= extension.sums
        self.published = ("policy", "critic") if self._critic.is_recurrent else ("policy",)

    def rates(self, lr: float, step: int) -> dict[str, float]:
        """The schedule's for policy and critic, their own for the extensions."""
        rates = {"policy": lr, "critic": lr}
        for extension in self._extensions:
            rates |= extension.rates(step)
        return rates

    def clipped(self) -> tuple[str, ...]:
        """Policy and critic."""
        return "policy", "critic"

    @torch.no_grad()
    def prepare(self, groups: Sequence[Group], step: int) -> Batch:
        """Values, advantages and mini-batches of this rank's fragments; one collective (and those of extensions).

        Raises:
            AsyncRLError: actor and learner disagree about the log-probabilities of the same weights.
        """
        rollout = stack_fragments(groups, self._group.device)
        start = look(self._actor, self._critic, rollout)
        rewards = rollout.rewards * self._algorithm.reward_scale
        for extension in self._extensions:
            rewards = extension.reward(rollout, rewards, step)
        advantages, returns = self._advantages(rollout, start, rewards)
        shares = self._split(rollout.acted, step)
        totals = sum_together(
            self._group,
            {
                "counts": sizes(shares),
                "advantages": moments(advantages, rollout.acted),
                "fit": fit(start.values, returns, rollout.acted),
                "difference": difference_sums(rollout, start.logprobs, step),
                "steps": step_sums(rollout, start.distribution, step),
                **{f"{role} moments": sums for role, sums in self._observation_moments(rollout).items()},
            },
        )
        advantages = normalized(advantages, totals["advantages"])
        amount = float(totals["counts"].sum())
        return Batch(
            data=PpoData(
                rollout=rollout,
                moments={n.removesuffix(" moments"): t for n, t in totals.items() if n.endswith(" moments")},
            ),
            updates=self._parts(rollout, start, advantages, returns, shares, filled(totals["counts"]))
            * self._algorithm.epochs,
            amount=amount,
            facts=self._agreement.judge(totals["difference"], step)
            | step_facts(totals, has_noise=start.distribution.noise() is not None),
        )

    def loss(self, batch: Batch, part: Part) -> tuple[torch.Tensor, Sums]:
        """Σ surrogate + value_coef Σ value loss - entropy_coef Σ entropy, over the samples of all ranks."""
        rollout, evaluated = batch.data.rollout, self._evaluator(batch.data.rollout, part)
        with torch.set_grad_enabled(evaluated.loss is None):
            loss, sums = self._losses(part, evaluated)
        loss = loss if evaluated.loss is None else loss + evaluated.loss
        if self._symmetry is not None and self._symmetry.mirror_coef > 0:
            mirror = self._symmetry.mirror_loss(self._actor, observations_of(rollout, part.share), part.count)
            loss = loss + self._symmetry.mirror_coef * mirror
            sums["mirror"] = mirror.detach()
        for extension in self._extensions:
            extra, more = extension.loss(rollout, part.share.index, part.count)
            loss = loss + extra
            sums |= more
        return loss, sums

    @torch.no_grad()
    def finish(self, batch: Batch, step: int) -> None:
        """Let the normalisers take in the step's observations: after the updates, as rsl_rl does."""
        for role, normalizer in self._normalizers().items():
            normalizer.update(batch.data.moments[role].to(self._group.device))
        for extension in self._extensions:
            extension.finish(batch.data.rollout, step)

    def metrics(self, totals: Totals, num_updates: int) -> Metrics:
        """Means over the updates of the step."""
        samples = max(1.0, float(totals["samples"]))
        metrics: Metrics = {
            "loss/policy": float(totals["policy"]) / num_updates,
            "loss/value": float(totals["value"]) / num_updates,
            "entropy": float(totals["entropy"]) / num_updates,
            "kl": float(totals["kl"]) / samples,
            "clip_fraction": float(totals["clipped"]) / num_updates,
        }
        if self._symmetry is not None:
            metrics["loss/mirror"] = float(totals["mirror"]) / num_updates
        for extension in self._extensions:
            metrics |= extension.metrics(totals, num_updates)
        return metrics

    def _losses(self, part: Part, evaluated: Evaluated) -> tuple[torch.Tensor, dict[str, torch.Tensor | float]]:
        algorithm, images, count = self._algorithm, evaluated.images, len(part.samples.actions)
        samples, distribution = part.samples.repeated(images), evaluated.distribution
        log_ratios = distribution.log_prob(evaluated.actions) - samples.old_logprobs
        surrogate, outside = surrogate_sum(log_ratios, samples.advantages, algorithm.clip, samples.weights)
        value = value_sum(evaluated.values, samples.values, samples.returns, algorithm.value_clip)
        originals = distribution if images == 1 else distribution[:count]
        entropy = originals.entropy().sum()
        share = 1 / (part.count * images)
        loss = surrogate * share + value * (algorithm.value_coef * share)
        if algorithm.entropy_coef > 0:
            loss = loss - entropy * (algorithm.entropy_coef / part.count)
        with torch.no_grad():
            kl = originals.detach().kl_from(samples.old).sum()  # type: ignore[arg-type]  # both of the same actor
            return loss, {
                "kl": kl,
                "samples": float(count),
                "policy": surrogate.detach() * share,
                "value": value.detach() * share,
                "entropy": entropy.detach() / part.count,
                "clipped": outside * share,
            }

    def _advantages(
        self, rollout: Rollout, start: StepStart, rewards: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        algorithm, ended = self._algorithm, rollout.terminated | rollout.truncated
        steps = (rewards, start.values, start.following, ended, rollout.acted, algorithm.gamma, algorithm.lam)
        if algorithm.correction == "none":
            return generalized_advantages(*steps)
        log_ratios = start.logprobs - rollout.logprobs
        return vtrace(log_ratios, *steps, algorithm.rho_max, algorithm.c_max)

    def _split(self, acted: torch.Tensor, step: int) -> list[Share]:
        split = split_environments if self._actor.is_recurrent else split_samples
        return split(acted, self._algorithm.minibatches, step_generator(self._config.seed, step, self._group.rank))

    def _parts(
        self,
        rollout: Rollout,
        start: StepStart,
        advantages: torch.Tensor,
        returns: torch.Tensor,
        shares: Sequence[Share],
        counts: Sequence[float],
    ) -> list[Part]:
        decoupled = self._algorithm.proximal == "recomputed"
        weights = (start.logprobs - rollout.logprobs).exp().clamp(max=self._algorithm.weight_max) if decoupled else None
        samples = Samples(
            actions=rollout.actions.flatten(0, 1),
            old_logprobs=(start.logprobs if decoupled else rollout.logprobs).flatten(),
            weights=None if weights is None else weights.flatten(),
            old=start.distribution,
            advantages=advantages.flatten(),
            values=start.values.flatten(),
            returns=returns.flatten(),
        )
        return make_parts(shares, counts, samples, *self._evaluator.inputs(rollout))

    def _normalizers(self) -> dict[str, Normalizer]:
        found = {"policy": self._actor.normalizer, "critic": self._critic.normalizer}
        return {role: module for role, module in found.items() if isinstance(module, Normalizer)}

    def _observation_moments(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        networks: dict[str, Actor | Critic] = {"policy": self._actor, "critic": self._critic}
        return {
            role: normalizer.moments(networks[role].observe(rollout.obs), rollout.acted)
            for role, normalizer in self._normalizers().items()
        }


def _make_extensions(config: ControlConfig, spaces: Spaces, group: LearnerGroup) -> list[Extension]:
    extensions: list[Extension] = []
    if config.amp.style_weight > 0:
        from learner.control.amp import Amp  # it scales the environment's reward, so it comes first

        extensions.append(Amp(config, spaces, group))
    if config.rnd.weight > 0:
        from learner.control.rnd import Rnd

        extensions.append(Rnd(config, spaces, group))
    return extensions


def _make_symmetry(config: ControlConfig, spaces: Spaces) -> Symmetry | None:
    if not config.symmetry.function:
        return None
    from learner.control.symmetry import Symmetry

    return Symmetry(config, spaces)
