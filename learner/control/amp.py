"""Adversarial motion priors: a reward for moving as an expert does (Peng et al. 2021, arXiv:2104.02180).

    policy's (s, s') ─► replay ─► D ─► -1 ┐
    expert's (s, s') ───────────► D ─► +1 ┴─► least squares + gradient penalty, for the discriminator alone
    rollout's (s, s') ──────────► D ─► style max(0, 1 - (D - 1)²/4) ─► task_weight · r + style_weight · style

The discriminator lies in the flat vector with its normaliser, so its gradient is reduced with all others and ranks stay
equal; only the replay is a rank's own, and the ranks of a resumed run all begin with that of rank 0. A step whose next
state is not known (an episode ended in it) has no style and is not learned from.
"""

from __future__ import annotations

import torch
from torch import nn

from async_rl.config import ControlConfig
from async_rl.control.normalizer import Normalizer
from async_rl.control.spaces import Spaces
from async_rl.metrics import Metrics
from learner.control.expert import load_expert
from learner.control.method import Sums, Totals
from learner.control.mlp import make_mlp
from learner.control.replay import TransitionReplay
from learner.control.rollout import Rollout
from learner.control.start import in_chunks
from learner.control.tally import sum_together
from learner.control.transitions import transitions_of
from learner.group import LearnerGroup

_SUMS = ("amp_loss", "amp_penalty", "amp_expert_right", "amp_policy_right", "amp_expert", "amp_policy")


class Discriminator(nn.Module):
    """Scores transitions: near +1 for the expert's, near -1 for the policy's.

    Args:
        config: of the run.
        size: D of a state.
    """

    def __init__(self, config: ControlConfig, size: int) -> None:
        super().__init__()
        self.normalizer: nn.Module = Normalizer(size) if config.amp.normalize else nn.Identity()
        self.mlp = make_mlp(2 * size, config.amp.hidden, 1, config.policy.activation)

    def join(self, states: torch.Tensor, next_states: torch.Tensor) -> torch.Tensor:
        """Its normalised input [.., 2D] of two states [.., D]."""
        return torch.cat((self.normalizer(states), self.normalizer(next_states)), dim=-1)

    def score(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores [..] of inputs [.., 2D]."""
        score: torch.Tensor = self.mlp(inputs)
        return score.squeeze(-1)

    def score_and_slope(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [m] of inputs [m, 2D], and their gradient by the inputs [m, 2D], both to be differentiated further.

        Autograd goes as far as the first layer's output, from where W leads on: the input needs no gradient then, and
        the graph's leaves are the parameters alone.
        """
        first = self.mlp[0](inputs)
        score: torch.Tensor = self.mlp[1:](first.clone())  # activations work in place
        score = score.squeeze(-1)
        (slope,) = torch.autograd.grad(score.sum(), first, create_graph=True)
        return score, slope @ self.mlp[0].weight


class Amp:
    """The extension ``amp``. It scales the environment's reward, so it comes before other extensions.

    Args:
        config: of the run.
        spaces: of the environment.
        group: the ranks.

    Raises:
        ConfigError: the expert's file is none, or ``observations.discriminator`` names a group that is not flat.
    """

    def __init__(self, config: ControlConfig, spaces: Spaces, group: LearnerGroup) -> None:
        self._config = config.amp
        self._seed = config.seed
        self._group = group
        self._groups = config.groups_of("discriminator")
        size = spaces.size_of(self._groups)
        self._discriminator = Discriminator(config, size).to(group.device)
        self._expert = load_expert(self._config.expert, size, group.device)
        self._expert_mean, self._expert_var = _mean_and_var(self._expert.states)
        self._replay = TransitionReplay(self._config.replay, size, group.device)
        self._generator = torch.Generator(device=group.device)
        self.modules = {"discriminator": self._discriminator}
        self.memories = {"replay": self._replay}
        self.sums = dict.fromkeys(_SUMS, 1)
        self._measured: dict[str, torch.Tensor] = {}
        self._style: float | None = None

    def rates(self, step: int) -> dict[str, float]:
        """``amp.lr``, always."""
        return {"discriminator": self._config.lr}

    @torch.no_grad()
    def reward(self, rollout: Rollout, rewards: torch.Tensor, step: int) -> torch.Tensor:
        """``task_weight · r + style_weight · style``; puts the rollout's transitions into the replay."""
        pairs, discriminator = transitions_of(rollout, self._groups), self._discriminator
        inputs = discriminator.join(pairs.states, pairs.next_states).flatten(0, 1)
        style = style_reward(in_chunks(discriminator.score, inputs)).view_as(rewards) * pairs.known
        self._replay.push(pairs.states[pairs.known], pairs.next_states[pairs.known])
        self._generator.manual_seed(draw_seed(self._seed, step, self._group.rank))
        self._measured = {"count": pairs.known.sum(), "style": style.sum()}
        if isinstance(discriminator.normalizer, Normalizer):
            self._measured["states"] = discriminator.normalizer.moments(pairs.states, pairs.known)
        return self._config.task_weight * rewards + self._config.style_weight * style

    def loss(self, rollout: Rollout, index: torch.Tensor, count: int) -> tuple[torch.Tensor, Sums]:
        """Equation 6 and 8 of the paper over as many transitions of each side as the update has samples.

        L = Σ_expert (D - 1)² + Σ_policy (D + 1)² + w/2 · Σ_expert |∇D|², divided by ``count``; the gradient is that by
        the normalised input.
        """
        size, w = len(index), self._config.gradient_penalty
        rows = torch.randint(len(self._expert), (size,), generator=self._generator, device=index.device)
        expert = self._discriminator.join(self._expert.states[rows], self._expert.next_states[rows])
        expert_score, slope = self._discriminator.score_and_slope(expert)
        if len(self._replay):
            policy = self._discriminator.join(*self._replay.sample(size, self._generator))
        else:  # every transition so far was an episode's end
            policy = expert[:0]
        policy_score = self._discriminator.score(policy)
        penalty = 0.5 * w * slope.square().sum() / count
        fit = ((expert_score - 1).square().sum() + (policy_score + 1).square().sum()) / count
        sums = {
            "amp_loss": fit.detach(),
            "amp_penalty": penalty.detach(),
            "amp_expert_right": (expert_score > 0).sum(),
            "amp_policy_right": (policy_score < 0).sum(),
            "amp_expert": len(expert_score),
            "amp_policy": len(policy_score),
        }
        return fit + penalty, sums

    @torch.no_grad()
    def finish(self, rollout: Rollout, step: int) -> None:
        """Take this step's states, and the expert's with equal weight, into the normaliser; one collective."""
        totals = sum_together(self._group, self._measured)
        count = float(totals["count"])
        self._style = float(totals["style"]) / count if count else None
        normalizer = self._discriminator.normalizer
        if isinstance(normalizer, Normalizer) and count:
            moments = totals["states"].to(self._group.device)
            normalizer.update(moments)
            normalizer.merge(moments[0], self._expert_mean, self._expert_var)

    def metrics(self, totals: Totals, num_updates: int) -> Metrics:
        """Mean style of the rollout; losses; how often the discriminator has the sign right for each side."""
        expert, policy = float(totals["amp_expert"]), float(totals["amp_policy"])
        return {
            "amp/style": self._style,
            "amp/accuracy_expert": float(totals["amp_expert_right"]) / expert if expert else None,
            "amp/accuracy_policy": float(totals["amp_policy_right"]) / policy if policy else None,
            "loss/discriminator": float(totals["amp_loss"]) / num_updates,
            "loss/gradient_penalty": float(totals["amp_penalty"]) / num_updates,
        }


def style_reward(score: torch.Tensor) -> torch.Tensor:
    """max(0, 1 - (D - 1)² / 4): 1 for the expert's score of +1, 0 for the policy's of -1 (equation 7)."""
    return (1 - 0.25 * (score - 1).square()).clamp(min=0)


def draw_seed(seed: int, step: int, rank: int) -> int:
    """One seed for each step and rank of a run, so that a resumed step draws as it would have."""
    return ((seed * 1_000_003 + step) * 65_537 + rank) % (1 << 63)


def _mean_and_var(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [D] each, of the population."""
    wide = states.double()
    return wide.mean(0), wide.var(0, correction=0)
