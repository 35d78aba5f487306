"""Weights of off-policy tokens, and the interpolated proximal policy, against numbers worked by hand."""

import math

import pytest
import torch

from learner.algorithms.correction import age_weights, correction_weights
from learner.algorithms.proximal import interpolated_logprobs

# sequence 0: w = 1.2, 3 (product 3.6, geometric mean 1.897);  sequence 1: 0.8, 0.5, 2 (product 0.8, mean 0.928)
LOG_WEIGHTS = torch.tensor([1.2, 0.8, 3.0, 0.5, 2.0]).log()
SEQUENCE = torch.tensor([0, 1, 0, 1, 1])


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        ("none", 0.5, 2.0, [1.2, 0.8, 3, 0.5, 2]),
        ("truncate", 0.5, 1.5, [1.2, 0.8, 1.5, 0.5, 1.5]),
        ("mask", 0.6, 2.5, [1.2, 0.8, 0, 0, 2]),
        ("sequence_mask", 0.5, 3.0, [0, 0.8, 0, 0.5, 2]),
        ("sequence_mask", 0.9, 4.0, [1.2, 0, 3, 0, 0]),
        ("geometric_mask", 0.5, 1.8, [0, 0.8, 0, 0.5, 2]),
        ("geometric_mask", 0.95, 2.0, [1.2, 0, 3, 0, 0]),
    ],
)
def test_each_correction_by_hand(kind, low, high, expected):
    weights = correction_weights(LOG_WEIGHTS.clone().requires_grad_(), SEQUENCE, 2, kind, low, high)
    assert weights.tolist() == pytest.approx(expected)
    assert not weights.requires_grad


def test_bounds_belong_to_what_is_kept():
    edges = torch.tensor([0.5, 2.0], dtype=torch.float64)
    weights = correction_weights(edges.log(), torch.tensor([0, 1]), 2, "mask", 0.5, 2.0)
    assert weights.tolist() == pytest.approx([0.5, 2.0])


@pytest.mark.parametrize("kind", ["none", "truncate", "mask", "sequence_mask", "geometric_mask"])
def test_extreme_weights_are_finite_and_empty_sequences_do_no_harm(kind):
    weights = correction_weights(torch.tensor([1e4, -1e4, 0.0]), torch.tensor([0, 2, 3]), 5, kind, 0.5, 2.0)
    assert torch.isfinite(weights).all()
    assert weights[2].item() == 1
    if kind.endswith("mask"):
        assert weights[:2].tolist() == [0, 0]


def test_age_weights_decay_and_end():
    ages = torch.tensor([0, 1, 2, 3, -1])
    assert age_weights(ages, 0.5, -1).tolist() == [1, 0.5, 0.25, 0.125, 1]
    assert age_weights(ages, 0.5, 2).tolist() == [1, 0.5, 0.25, 0, 1]
    assert age_weights(ages, 1.0, 0).tolist() == [1, 0, 0, 0, 1]


def test_the_interpolated_policy_moves_from_the_current_one_to_the_behaviour_at_age_one_and_back_with_age():
    behaviour = torch.full((4,), math.log(0.1))
    current = torch.full((4,), math.log(0.4), requires_grad=True)
    between = interpolated_logprobs(behaviour, current, torch.tensor([0, 1, 2, 4]))
    # α = 0, 1, 1/2, 1/4: geometric means 0.4, 0.1, sqrt(0.04) = 0.2, 0.1^(1/4) · 0.4^(3/4)
    assert between.exp().tolist() == pytest.approx([0.4, 0.1, 0.2, 0.1**0.25 * 0.4**0.75])
    assert not between.requires_grad
