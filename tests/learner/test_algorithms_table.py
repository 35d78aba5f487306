"""One small batch worked by hand with the papers' formulas: the table of docs/algorithms.md in numbers.

Two answers of one group: y1 = (a, b) with reward 1, y2 = (c) with reward 0.

| token | π    | μ   | π / μ | proximal | proximal / μ | π / proximal | π_ref | π_ref / π | A  | age |
|-------|------|-----|-------|----------|--------------|--------------|-------|-----------|----|-----|
| a     | 0.30 | 0.2 | 1.5   | 0.25     | 1.25         | 1.2          | 0.60  | 2         | +1 | 1   |
| b     | 0.45 | 0.5 | 0.9   | 0.50     | 1            | 0.9          | 0.45  | 1         | +1 | 0   |
| c     | 0.20 | 0.4 | 0.5   | 0.25     | 0.625        | 0.8          | 0.10  | 0.5       | -1 | 2   |
"""

import math

import pytest
import torch
from naive import Token, run_objective

from async_rl.config import AlgorithmConfig
from learner.algorithms.gae import generalized_advantages
from learner.algorithms.group_relative import group_advantages
from learner.algorithms.objective import Counts
from learner.algorithms.reinforce_pp import rewards_to_go
from learner.algorithms.rloo import leave_one_out_advantages
from learner.algorithms.whitening import moments, whiten


def token(policy, behaviour, proximal, reference, advantage, age, entropy, values):
    logs = {"logprob": policy, "behaviour": behaviour, "proximal": proximal, "reference": reference}
    value, old, target = values
    return Token(
        **{name: math.log(p) for name, p in logs.items()},
        advantage=advantage,
        age=age,
        entropy=entropy,
        value=value,
        old_value=old,
        target=target,
    )


BATCH = [
    [
        token(0.30, 0.2, 0.25, 0.60, 1.0, 1, 0.3, (0.7, 0.5, 0.8)),
        token(0.45, 0.5, 0.50, 0.45, 1.0, 0, 0.6, (0.5, 0.6, 1.0)),
    ],
    [token(0.20, 0.4, 0.25, 0.10, -1.0, 2, 0.9, (0.6, 0.2, 0.0))],
]
DECOUPLED = {"proximal": "recomputed", "clip_low": 0.1, "clip_high": 0.1}

TABLE = {
    # min(1.5, 1.2) + 0.9 - max(0.5, 0.8) = 1.3, over 3 tokens
    "ppo": ({}, -0.433333),
    # ((1.2 + 0.9) / 2 - 0.8) / 2 sequences
    "ppo, mean over sequences": ({"aggregation": "sequence"}, -0.125),
    # 1.3 / (2 sequences · 4 tokens at most)
    "ppo, constant (Dr.GRPO)": ({"aggregation": "constant"}, -0.1625),
    # 1.28 + 0.9 - 0.8
    "clip-higher (DAPO)": ({"clip_high": 0.28}, -0.46),
    # s1 = sqrt(1.5 · 0.9) = 1.161895, s2 = 0.5, both inside [0.4, 1.6]: (1.161895 - 0.5) / 2
    "gspo": ({"loss": "gspo", "aggregation": "sequence", "clip_low": 0.6, "clip_high": 0.6}, -0.330948),
    # s1 clipped to 1.1; s2 below 0.9 with A < 0, so 0.9: (1.1 - 0.9) / 2
    "gspo, clipped": ({"loss": "gspo", "aggregation": "sequence", "clip_low": 0.1, "clip_high": 0.1}, -0.1),
    # 1.2 ln 0.3 + 0.9 ln 0.45 - 0.5 ln 0.2 = -1.444767 - 0.718657 + 0.804719 = -1.358705
    "cispo": ({"loss": "cispo", "clip_low": 1.0, "clip_high": 0.2}, 0.452902),
    # 1.5 + 0.9 - 0.5 = 1.9
    "importance": ({"loss": "importance"}, -0.633333),
    # w · clipped ratio: 1.25 · 1.1 + 1 · 0.9 - 0.625 · 0.9 = 1.375 + 0.9 - 0.5625 = 1.7125
    "decoupled": (DECOUPLED, -0.570833),
    # 1.1 · 1.1 + 0.9 - 0.5625 = 1.5475
    "decoupled, truncated at 1.1": ({**DECOUPLED, "correction": "truncate", "correction_high": 1.1}, -0.515833),
    # 1.25 and 0.625 are outside: 0.9
    "decoupled, IcePop": (
        {**DECOUPLED, "correction": "mask", "correction_low": 0.7, "correction_high": 1.2},
        -0.3,
    ),
    # products 1.25 (outside), 0.625: -0.5625
    "decoupled, sequence mask": (
        {**DECOUPLED, "correction": "sequence_mask", "correction_low": 0.6, "correction_high": 1.2},
        0.1875,
    ),
    # geometric means 1.118, 0.625 (outside): 1.375 + 0.9
    "decoupled, geometric mask": (
        {**DECOUPLED, "correction": "geometric_mask", "correction_low": 0.7, "correction_high": 1.2},
        -0.758333,
    ),
    # proximal: a (age 1) μ = 0.2; b (age 0) π = 0.45; c (age 2) sqrt(0.4 · 0.2) = 0.282843
    # w = 1, 0.9, 0.707107; ratios 1.5, 1, 0.707107 -> 1.1, 1, 0.9: 1.1 + 0.9 - 0.636396
    "decoupled, interpolated": ({**DECOUPLED, "proximal": "interpolated"}, -0.454535),
    # 0.9^age: 0.9 · 1.2 + 0.9 - 0.81 · 0.8 = 1.332
    "age decay": ({"age_decay": 0.9}, -0.444),
    # c is too old: 1.2 + 0.9, still over 3 tokens
    "age limit": ({"max_token_age": 1}, -0.7),
    # k3: (2 - 1 - ln 2) + 0 + (0.5 - 1 + ln 2) = 0.5: -0.433333 + 0.3 · 0.5 / 3
    "k3 in the loss": ({"kl_coef": 0.3}, -0.383333),
    # k2: 2 · (ln 2)² / 2 = 0.480453: -0.433333 + 0.3 · 0.480453 / 3
    "k2 in the loss": ({"kl_coef": 0.3, "kl_estimator": "k2"}, -0.385288),
    # max(0.01, (0.6 - 0.8)²) + max(0.25, 0.25) + max(0.36, 0.09) = 0.65: -0.433333 + 0.5 · 0.65 / 3
    "critic": ({"advantage": "gae", "value_clip": 0.1}, -0.325),
    # -0.433333 - 0.1 · 1.8 / 3
    "entropy bonus": ({"entropy_coef": 0.1}, -0.493333),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_loss_is_what_the_paper_gives_by_hand(name):
    settings, expected = TABLE[name]
    counts = Counts(num_tokens=3, num_sequences=2, longest=4)
    assert run_objective(BATCH, AlgorithmConfig(**settings), counts)[0] == pytest.approx(expected, abs=1e-6)


def test_the_advantages_are_what_the_papers_give_by_hand():
    rewards, group, sequence = torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([0, 0, 1])
    # GRPO: mean 0.5, std 0.5.  Dr.GRPO: minus the mean.  RLOO: minus the other
    assert group_advantages(rewards, group, True).tolist() == pytest.approx([1, -1], abs=1e-5)
    assert group_advantages(rewards, group, False).tolist() == [0.5, -0.5]
    assert leave_one_out_advantages(rewards, group).tolist() == [1, -1]
    # REINFORCE++ with penalties 0.1, 0.2, 0.3: to go 1 - 0.3, 1 - 0.2, 0 - 0.3 = 0.7, 0.8, -0.3
    # mean 0.4, std sqrt((0.09 + 0.16 + 0.49) / 3) = 0.496655
    to_go = rewards_to_go(rewards, torch.tensor([0.1, 0.2, 0.3]), sequence)
    assert to_go.tolist() == pytest.approx([0.7, 0.8, -0.3])
    assert whiten(to_go, moments(to_go)).tolist() == pytest.approx([0.604041, 0.805388, -1.409428], abs=1e-5)
    # GAE(1, 0.5), V = 0.5, 0.6 | 0.2: δ = 0.6 - 0.5, 1 - 0.6 | 0 - 0.2;  A = 0.1 + 0.5 · 0.4, 0.4 | -0.2
    values = torch.tensor([0.5, 0.6, 0.2])
    advantages, returns = generalized_advantages(torch.tensor([0.0, 1.0, 0.0]), values, sequence, 1.0, 0.5)
    assert advantages.tolist() == pytest.approx([0.3, 0.4, -0.2])
    assert returns.tolist() == pytest.approx([0.8, 1.0, 0.0])
