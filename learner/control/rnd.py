"""Random network distillation (Burda et al. 2018, arXiv:1810.12894): reward for states that a predictor does not know.

    s' ─► normalise ─┬─► predictor  p(s') ─┐
                     └─► target     f(s') ─┴─► |p - f| ─► / running deviation ─► · weight ─► + reward of the step
                         (frozen)              loss: (p - f)², for the predictor alone

The reward of a step is for the state *behind* it, and the predictor is trained on just these states, so that the end of
an episode becomes as familiar as what lies before it. Where an episode ended and the environment does not tell in what
state, the first one of the next episode stands in, as in rsl_rl.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from async_rl.config import ControlConfig
from async_rl.config.control import RndConfig
from async_rl.control.normalizer import Normalizer
from async_rl.control.spaces import Spaces
from async_rl.metrics import Metrics
from learner.control.method import Memory, Sums, Totals
from learner.control.mlp import make_mlp
from learner.control.rollout import Rollout
from learner.control.start import in_chunks
from learner.control.tally import sum_together
from learner.control.transitions import transitions_of
from learner.group import LearnerGroup


class RndNetworks(nn.Module):
    """Predictor, frozen target, and the running statistics of states and intrinsic returns.

    Args:
        config: of the run.
        size: D of a state.
    """

    def __init__(self, config: ControlConfig, size: int) -> None:
        super().__init__()
        rnd, activation = config.rnd, config.policy.activation
        self.predictor = make_mlp(size, rnd.hidden, rnd.outputs, activation)
        self.target = make_mlp(size, rnd.hidden, rnd.outputs, activation).requires_grad_(False)
        self.states: nn.Module = Normalizer(size) if rnd.normalize_states else nn.Identity()
        self.returns: Normalizer | None = Normalizer(1) if rnd.normalize_rewards else None


class Rnd:
    """The extension ``rnd``.

    Args:
        config: of the run.
        spaces: of the environment.
        group: the ranks.

    Raises:
        ConfigError: an observation group of ``observations.rnd`` does not exist or is not flat.
    """

    def __init__(self, config: ControlConfig, spaces: Spaces, group: LearnerGroup) -> None:
        self._config = config.rnd
        self._gamma = config.algorithm.gamma
        self._groups = config.groups_of("rnd")
        self._group = group
        self._networks = RndNetworks(config, spaces.size_of(self._groups)).to(group.device)
        self.modules = {"rnd": self._networks}
        self.memories: Mapping[str, Memory] = {}
        self.sums = {"rnd_loss": 1}
        self._measured: Metrics = {}
        self._inputs = torch.empty(0)
        self._targets = torch.empty(0)
        self._moments = torch.empty(0)

    def rates(self, step: int) -> dict[str, float]:
        """``rnd.lr``, always."""
        return {"rnd": self._config.lr}

    @torch.no_grad()
    def reward(self, rollout: Rollout, rewards: torch.Tensor, step: int) -> torch.Tensor:
        """Add ``weight · |p(s') - f(s')| / deviation`` where an action counted; one collective."""
        networks = self._networks
        next_states = transitions_of(rollout, self._groups).next_states
        self._inputs = networks.states(next_states).flatten(0, 1)
        self._targets = in_chunks(networks.target, self._inputs)
        novelty = torch.linalg.vector_norm(in_chunks(networks.predictor, self._inputs) - self._targets, dim=-1)
        novelty = novelty.view_as(rewards) * rollout.acted
        mean, deviation = self._measure(next_states, novelty, rollout.acted)
        weight = weight_at(self._config, step)
        self._measured = {"rnd/weight": weight, "rnd/reward": weight * mean / deviation, "rnd/novelty": mean}
        return rewards + weight / deviation * novelty

    def loss(self, rollout: Rollout, index: torch.Tensor, count: int) -> tuple[torch.Tensor, Sums]:
        """Mean squared difference between predictor and target, Σ (p - f)² / (count · outputs)."""
        difference = self._networks.predictor(self._inputs[index]) - self._targets[index]
        loss = difference.square().sum() / (count * self._config.outputs)
        return loss, {"rnd_loss": loss.detach()}

    def finish(self, rollout: Rollout, step: int) -> None:
        """Take the states that were rewarded into their running statistics."""
        if isinstance(self._networks.states, Normalizer):
            self._networks.states.update(self._moments)
        self._inputs = self._targets = torch.empty(0)

    def metrics(self, totals: Totals, num_updates: int) -> Metrics:
        """Means over the step's samples: reward, its weight, the error of prediction before the updates; their loss."""
        return {**self._measured, "loss/rnd": float(totals["rnd_loss"]) / num_updates}

    def _measure(self, next_states: torch.Tensor, novelty: torch.Tensor, acted: torch.Tensor) -> tuple[float, float]:
        """Mean novelty of all ranks, and the running deviation of its discounted sum, this step's included.

        The moments of the states are reduced on the way and wait for :meth:`finish`.
        """
        states, returns = self._networks.states, self._networks.returns
        parts = {"count": acted.sum(), "novelty": novelty.sum()}
        if isinstance(states, Normalizer):
            parts["states"] = states.moments(next_states, acted)
        if returns is not None:
            discounted = discounted_sums(novelty, self._gamma, returns.mean)
            parts["returns"] = returns.moments(discounted.unsqueeze(-1), acted)
        totals = sum_together(self._group, parts)
        mean = float(totals["novelty"] / totals["count"].clamp(min=1))
        if isinstance(states, Normalizer):
            self._moments = totals["states"].to(novelty.device)
        if returns is None:
            return mean, 1.0
        returns.update(totals["returns"].to(novelty.device))
        return mean, float(returns.var.sqrt()) or 1.0  # all alike: as they are


def discounted_sums(rewards: torch.Tensor, gamma: float, start: torch.Tensor) -> torch.Tensor:
    """Discounted sums of what came before, R_t = γ R_{t-1} + r_t, over episodes' ends (Burda et al. 2018, section 2.4).

    A fragment does not know the sum that its environments had before it. It begins at the running mean of all sums, so
    that their scale does not depend on the length of a fragment.

    Args:
        rewards: [T, N]
        gamma: discount.
        start: R_{-1}, [1].
    """
    sums = torch.empty_like(rewards)
    before = start.expand(rewards.shape[1])
    for t, now in enumerate(rewards):
        before = torch.add(now, before, alpha=gamma, out=sums[t])
    return sums


def weight_at(config: RndConfig, step: int) -> float:
    """Weight of the intrinsic reward at a learner step: ``weight`` at 0, ``final_weight`` from ``final_step`` on."""
    if config.schedule == "constant":
        return config.weight
    done = min(step / config.final_step, 1.0)
    if config.schedule == "step":
        done = float(done == 1.0)
    return config.weight + (config.final_weight - config.weight) * done
