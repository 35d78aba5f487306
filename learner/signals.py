"""From rewards to what each trained token is told: pure arithmetic between the forward passes and the loss.

    rewards [S] + soft length penalty ─┬─ group ─► advantages [M]       grpo, dr_grpo, rloo: one for a whole sequence
    KL penalties [M] ──────────────────┼─ to go ─► advantages [M]       reinforce_pp
    values [M] of the critic ──────────┴─ GAE ───► advantages, returns [M]
    log-probabilities of the teacher [M] ────────► advantages [M]       distill

``reinforce_pp`` and ``gae`` are normalised over the batch of all ranks afterwards, see :mod:`learner.prepare`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch

from async_rl.config import Config
from learner.algorithms.distillation import distillation_advantages
from learner.algorithms.gae import generalized_advantages
from learner.algorithms.group_relative import group_advantages
from learner.algorithms.kl import kl_estimate
from learner.algorithms.overlong import overlong_penalty
from learner.algorithms.reinforce_pp import rewards_to_go
from learner.algorithms.rloo import leave_one_out_advantages
from learner.algorithms.segments import sequence_sums
from learner.sequences import Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What each of the M trained tokens of a mini-batch is told in a step; float32 on the CPU, None: not needed."""

    advantages_M: torch.Tensor
    proximal_logprobs_M: torch.Tensor | None = None
    """Of the policy at the start of the step, forwarded again."""
    ref_logprobs_M: torch.Tensor | None = None
    """Of the reference, where they are known before the loss."""
    old_values_M: torch.Tensor | None = None
    """Of the critic at the start of the step."""
    returns_M: torch.Tensor | None = None
    """What the critic learns to predict; nan where nothing scored the sequence."""

    @property
    def known(self) -> Mapping[str, torch.Tensor]:
        """Those that are not None, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part for name, part in named.items() if part is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """What was forwarded before the first update of a step; float32 ``[M]`` on the CPU, None: not needed."""

    proximal_logprobs_M: torch.Tensor | None = None
    ref_logprobs_M: torch.Tensor | None = None
    values_M: torch.Tensor | None = None


def make_signals(config: Config, sequences: Sequences, forwarded: Forwarded, kl_coef: float) -> Signals:
    """Rewards to advantages (not yet normalised over the batch) and returns.

    Args:
        config: algorithm and sampling limits.
        sequences: of one mini-batch of this rank.
        forwarded: old policy, reference and critic at its tokens, as far as the configuration needs them.
        kl_coef: β of this step.
    """
    algorithm = config.algorithm
    sequence_M = torch.from_numpy(sequences.sequence_M)
    student_M = forwarded.proximal_logprobs_M
    if student_M is None:
        student_M = torch.from_numpy(sequences.behaviour_logprobs_M)
    reference_M, values_M, returns_M = forwarded.ref_logprobs_M, forwarded.values_M, None
    rewards_S = shaped_rewards(config, sequences)
    penalties_M = torch.zeros_like(student_M)
    if reference_M is not None and algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
        penalties_M = kl_coef * kl_estimate(algorithm.kl_estimator, student_M, reference_M)
    if algorithm.advantage == "distill":
        assert reference_M is not None
        advantages_M = distillation_advantages(reference_M, student_M)
    elif algorithm.advantage == "gae":
        assert values_M is not None
        rewards_M = outcome_at_the_end(rewards_S, sequences) - penalties_M
        advantages_M, returns_M = generalized_advantages(
            rewards_M, values_M, sequence_M, algorithm.gamma, algorithm.lam
        )
    elif algorithm.advantage == "reinforce_pp":
        advantages_M = rewards_to_go(rewards_S, penalties_M, sequence_M)
    else:
        group_S = torch.from_numpy(sequences.group_S)
        totals_S = rewards_S - sequence_sums(penalties_M, sequence_M, len(rewards_S))
        if algorithm.advantage == "rloo":
            advantages_M = leave_one_out_advantages(totals_S, group_S)[sequence_M]
        else:
            advantages_M = group_advantages(totals_S, group_S, algorithm.advantage == "grpo")[sequence_M]
    return Signals(
        advantages_M=advantages_M,
        proximal_logprobs_M=forwarded.proximal_logprobs_M,
        ref_logprobs_M=reference_M,
        old_values_M=values_M,
        returns_M=returns_M,
    )


def shaped_rewards(config: Config, sequences: Sequences) -> torch.Tensor:
    """Rewards ``[S]`` with the soft length penalty; what is reported stays the raw reward."""
    rewards_S = torch.from_numpy(sequences.rewards_S)
    buffer = config.algorithm.overlong_buffer
    if buffer == 0:
        return rewards_S
    return rewards_S + overlong_penalty(torch.from_numpy(sequences.trained_S), config.max_sampled, buffer)


def outcome_at_the_end(rewards_S: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """float32 ``[M]``: the reward at the last trained token of each sequence, 0 elsewhere."""
    rewards_M = torch.zeros(len(sequences.token_M))
    answered_S = np.flatnonzero(sequences.trained_S)
    last_S = (sequences.firsts_S + sequences.trained_S - 1)[answered_S]
    rewards_M[last_S] = rewards_S[answered_S].float()
    return rewards_M
