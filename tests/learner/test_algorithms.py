"""Advantages, losses, aggregation and schedules, against numbers worked by hand."""

import math

import pytest
import torch

from async_rl.config import AlgorithmConfig
from learner.algorithms.advantages import group_advantages
from learner.algorithms.grpo import grpo_loss, ratio_histogram, ratio_percentile
from learner.algorithms.losses import aggregate, clipped_ratio_loss, k3_kl
from learner.algorithms.schedules import kl_adaptive_lr, warmup
from learner.batching import MicroBatch


def advantages(rewards, groups, normalize_std=True):
    return group_advantages(torch.tensor(rewards), torch.tensor(groups), normalize_std).tolist()


def test_advantages_are_rewards_in_standard_deviations_from_the_group_mean():
    # mean 0.5, population std sqrt((0.25 * 4) / 4) = 0.5, so +-1
    assert advantages([1.0, 0.0, 1.0, 0.0], [0, 0, 0, 0]) == pytest.approx([1, -1, 1, -1], abs=1e-5)


def test_each_group_has_its_own_mean_even_when_groups_are_interleaved():
    # group 0: 0, 3 -> mean 1.5; group 1: 10, 20 -> mean 15; without std only the mean is subtracted
    assert advantages([0.0, 10.0, 3.0, 20.0], [0, 1, 0, 1], normalize_std=False) == [-1.5, -5.0, 1.5, 5.0]


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -7.3, 1e6])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_group_of_equal_rewards_has_advantage_exactly_zero(reward, normalize_std):
    assert advantages([reward] * 7, [0] * 7, normalize_std) == [0.0] * 7


def test_an_unscored_sequence_gets_advantage_zero_and_leaves_the_others_alone():
    # without the NaN: 2, 0, 1 -> mean 1, std sqrt(2/3)
    step = 1 / math.sqrt(2 / 3)
    assert advantages([2.0, float("nan"), 0.0, 1.0], [0] * 4) == pytest.approx([step, 0, -step, 0], abs=1e-5)


def test_no_sequences_give_no_advantages():
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), True).shape == (0,)


def test_clip_cuts_only_the_side_that_would_be_rewarded():
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    logprobs = ratios.log().requires_grad_()
    loss, clipped = clipped_ratio_loss(
        logprobs, torch.zeros(5), torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0]), clip_low=0.2, clip_high=0.3
    )
    # 1.5, A=1: min(1.5, 1.3) -> -1.3, cut.   1.5, A=-1: min(-1.5, -1.3) -> 1.5.
    # 0.5, A=1: min(0.5, 0.8) -> -0.5.        0.5, A=-1: min(-0.5, -0.8) -> 0.8, cut.   1.1, A=2: -2.2.
    assert loss.tolist() == pytest.approx([-1.3, 1.5, -0.5, 0.8, -2.2])
    assert clipped.tolist() == [True, False, False, True, False]
    loss.sum().backward()
    # d(-r A)/dlogp = -r A where it is not cut
    assert logprobs.grad.tolist() == pytest.approx([0, 1.5, -0.5, 0, -2.2])


def test_at_ratio_one_the_gradient_is_that_of_the_plain_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, _ = clipped_ratio_loss(logprobs, logprobs.detach(), torch.tensor([0.7, -0.3]), 0.2, 0.2)
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.7, 0.3])


def test_k3_is_the_exponential_of_the_difference_minus_one_minus_the_difference():
    # d = ln 2: 2 - 1 - ln 2;  d = 0: 0;  d = -ln 2: 0.5 - 1 + ln 2
    kl = k3_kl(torch.tensor([0.0, -1.0, 0.0]), torch.tensor([math.log(2), -1.0, -math.log(2)]))
    assert kl.tolist() == pytest.approx([1 - math.log(2), 0.0, math.log(2) - 0.5], abs=1e-6)


def test_token_aggregation_divides_by_global_tokens_and_sequence_aggregation_by_global_sequences():
    values, lengths = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([2.0, 2.0, 1.0])
    # tokens: 9 / 10.  sequences: ((1 + 2) / 2 + 6) / 4 = 1.875
    assert aggregate(values, lengths, "token", 10, 4).item() == pytest.approx(0.9)
    assert aggregate(values, lengths, "sequence", 10, 4).item() == pytest.approx(1.875)


def micro_batch(behaviour, advantage, lengths, ages):
    whole = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        inputs_RL=whole.view(0, 0),
        source_N=whole,
        targets_N=whole,
        reads_M=whole,
        behaviour_logprobs_M=torch.tensor(behaviour),
        advantages_M=torch.tensor(advantage),
        sequence_lengths_M=torch.tensor(lengths),
        ages_M=torch.tensor(ages),
    )


def test_grpo_reports_sums_that_can_be_checked_by_hand():
    batch = micro_batch([math.log(0.5), math.log(0.4)], [1.0, -1.0], [2.0, 2.0], [0, 2])
    logprobs = torch.tensor([math.log(0.5), math.log(0.8)])  # ratios 1 and 2
    reference = torch.tensor([math.log(0.5), math.log(0.4)])
    loss, sums = grpo_loss(
        batch, logprobs, torch.tensor([0.5, 0.25]), reference, AlgorithmConfig(kl_coef=0.1), 4, 2, num_ages=4
    )
    # policy: (-1 + 2) / 4;  KL: second token d = -ln 2: (ln 2 - 0.5) / 4, times 0.1
    assert sums["loss_policy"].item() == pytest.approx(0.25)
    assert sums["loss_kl"].item() == pytest.approx(0.1 * (math.log(2) - 0.5) / 4, abs=1e-6)
    assert loss.item() == pytest.approx(sums["loss_policy"].item() + sums["loss_kl"].item())
    assert sums["tokens"].item() == 2
    assert sums["ratio"].item() == pytest.approx(3)
    assert sums["ratio_squared"].item() == pytest.approx(5)
    assert sums["clipped"].item() == 0  # ratio 2 with a negative advantage is not cut
    assert sums["entropy"].item() == pytest.approx(0.75)
    assert sums["kl_k1"].item() == pytest.approx(-math.log(2))
    assert sums["kl_k3"].item() == pytest.approx(2 - 1 - math.log(2))
    assert sums["difference_age0"].item() == pytest.approx(0, abs=1e-7)
    assert sums["tokens_age0"].item() == 1
    assert sums["difference_older"].item() == pytest.approx(math.log(2))
    assert sums["age_histogram"].tolist() == [1, 0, 1, 0]


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
    assert histogram.sum().item() == 4
    assert histogram[0].item() == 1
    assert histogram[-1].item() == 2


@pytest.mark.parametrize(
    ("lr", "kl", "expected"),
    [
        (3e-4, 0.021, 2e-4),  # above twice the target: / 1.5
        (2e-4, 0.004, 3e-4),  # below half: * 1.5
        (3e-4, 0.02, 3e-4),  # in between, bounds included
        (3e-4, 0.005, 3e-4),
        (1.2e-6, 1.0, 1e-6),  # limits
        (9e-3, 0.0, 1e-2),
        (5e-7, 1.0, 5e-7),  # beyond a limit it stays: a high KL never raises it, a low one never lowers it
        (0.0, 1.0, 0.0),
        (2e-2, 0.0, 2e-2),
    ],
)
def test_kl_adaptive_learning_rate(lr, kl, expected):
    assert kl_adaptive_lr(lr, kl, target=0.01) == pytest.approx(expected)


def test_warmup_rises_linearly_to_one():
    assert [warmup(s, 4) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup(0, 0) == 1.0
