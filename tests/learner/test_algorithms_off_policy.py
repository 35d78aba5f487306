"""What is always reported about off-policy data, against loops over plain floats."""

import math
from dataclasses import replace

import pytest
import torch
from naive import random_sequences

from learner.algorithms.off_policy import (
    RATIO_BINS,
    effective_sample_size,
    off_policy_sizes,
    off_policy_sums,
    ratio_histogram,
    ratio_percentile,
)


def sums_of(sequences, weights, num_ages=4):
    flat = [(s, t) for s, tokens in enumerate(sequences) for t in tokens]
    return off_policy_sums(
        torch.tensor([t.logprob for _, t in flat], dtype=torch.float64),
        torch.tensor([t.behaviour for _, t in flat], dtype=torch.float64),
        torch.tensor(weights, dtype=torch.float64),
        torch.tensor([t.age for _, t in flat]),
        torch.tensor([s for s, _ in flat]),
        len(sequences),
        num_ages,
    )


def test_sums_agree_with_loops():
    sequences = random_sequences(5)
    tokens = [t for s in sequences for t in s]
    weights = [0.0 if i % 3 == 0 else 0.5 * i for i in range(len(tokens))]
    sums = sums_of(sequences, weights)
    ratios = [math.exp(t.logprob - t.behaviour) for t in tokens]
    expected = {
        "tokens": len(tokens),
        "ratio": sum(ratios),
        "ratio_squared": sum(r * r for r in ratios),
        "weight": sum(weights),
        "weight_squared": sum(w * w for w in weights),
        "masked": sum(w == 0 for w in weights),
        "kl_k1": sum(t.behaviour - t.logprob for t in tokens),
        "kl_k3": sum(r - 1 - math.log(r) for r in ratios),
    }
    assert {name: sums[name].item() for name in expected} == pytest.approx(expected)
    # ages are 0 to 4; the fifth falls into the last of four bins
    difference, count = [0.0] * 4, [0] * 4
    for t in tokens:
        difference[min(t.age, 3)] += abs(t.logprob - t.behaviour)
        count[min(t.age, 3)] += 1
    assert sums["age_histogram"].tolist() == count
    assert sums["age_difference"].tolist() == pytest.approx(difference)
    assert {name: s.numel() for name, s in sums.items()} == off_policy_sizes(4)


def test_sequences_are_fresh_if_all_their_tokens_have_age_0():
    sequences = random_sequences(7)
    sequences = [[replace(t, age=0) for t in s] if i % 2 else s for i, s in enumerate(sequences)]
    mixed = [replace(sequences[0][0], age=0), *(replace(t, age=1) for t in sequences[0][:1])]
    sums = sums_of([*sequences, mixed], [1.0] * (sum(map(len, sequences)) + 2))
    fresh = [t for s in sequences if all(t.age == 0 for t in s) for t in s]
    assert fresh
    assert sums["fresh"] == len(fresh) < sums["age_histogram"][0]
    assert float(sums["fresh_difference"]) == pytest.approx(sum(abs(t.logprob - t.behaviour) for t in fresh))


def test_sequences_are_counted_by_the_product_and_by_the_geometric_mean_of_their_ratios():
    sequences = random_sequences(6)
    sums = sums_of(sequences, [1.0] * sum(map(len, sequences)))
    logs = [sum(t.logprob - t.behaviour for t in s) for s in sequences]
    means = [log / len(s) for log, s in zip(logs, sequences, strict=True)]
    for name, expected in (("sequence_ratio_histogram", logs), ("sequence_mean_histogram", means)):
        assert sums[name].tolist() == ratio_histogram(torch.tensor(expected, dtype=torch.float64)).tolist()
        assert sums[name].sum().item() == len(sequences)
        smallest = math.exp(min(expected))
        assert ratio_percentile(sums[name], 0.01) == pytest.approx(smallest, rel=0.03)


def test_sequences_without_tokens_here_are_not_counted():
    sums = sums_of([[], random_sequences(7, count=1)[0], []], [1.0] * len(random_sequences(7, count=1)[0]))
    assert sums["sequence_ratio_histogram"].sum().item() == 1


def test_effective_sample_size_is_one_for_equal_weights_and_less_for_unequal_ones():
    def ess(weights):
        w = torch.tensor(weights)
        totals = {"tokens": torch.tensor(len(weights)), "weight": w.sum(), "weight_squared": w.square().sum()}
        return effective_sample_size(totals, "weight")

    assert ess([2.0, 2.0, 2.0]) == pytest.approx(1)
    assert ess([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert ess([3.0, 1.0]) == pytest.approx(16 / 20)  # (3 + 1)² / (2 · (9 + 1))
    assert ess([]) == 1


def test_ratio_percentiles_come_back_from_the_histogram_within_a_bin():
    log_ratios = torch.linspace(-0.5, 0.5, 10_001)
    histogram = ratio_histogram(log_ratios)
    assert histogram.sum().item() == 10_001
    for fraction in (0.01, 0.5, 0.99):
        exact = math.exp(log_ratios.quantile(fraction).item())
        assert ratio_percentile(histogram, fraction) == pytest.approx(exact, rel=0.01)
    assert ratio_percentile(torch.zeros_like(histogram), 0.5) == 1.0


def test_extreme_and_undefined_ratios_fall_into_the_histogram_too():
    histogram = ratio_histogram(torch.tensor([1e9, -1e9, float("inf"), float("nan")]))
    assert len(histogram) == RATIO_BINS
    assert histogram.sum().item() == 4
    assert histogram[0].item() == 1
    assert histogram[-1].item() == 2
