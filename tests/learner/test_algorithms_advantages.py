"""Advantages against numbers worked by hand and against loops over plain floats."""

import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import interleaved

from learner.algorithms.distillation import distillation_advantages
from learner.algorithms.gae import generalized_advantages
from learner.algorithms.group_relative import group_advantages
from learner.algorithms.overlong import overlong_penalty
from learner.algorithms.reinforce_pp import rewards_to_go
from learner.algorithms.rloo import leave_one_out_advantages
from learner.algorithms.segments import discounted_to_go, following, sequence_sums
from learner.algorithms.whitening import moments, whiten

NAN, INF = math.nan, math.inf


def grouped(rewards, groups, normalize_std=True):
    return group_advantages(torch.tensor(rewards), torch.tensor(groups), normalize_std).tolist()


def left_out(rewards, groups):
    return leave_one_out_advantages(torch.tensor(rewards), torch.tensor(groups)).tolist()


def test_advantages_are_rewards_in_standard_deviations_from_the_group_mean():
    # mean 0.5, population std sqrt((0.25 * 4) / 4) = 0.5, so +-1
    assert grouped([1.0, 0.0, 1.0, 0.0], [0, 0, 0, 0]) == pytest.approx([1, -1, 1, -1], abs=1e-5)


def test_each_group_has_its_own_mean_even_when_groups_are_interleaved():
    # group 0: 0, 3 -> mean 1.5; group 1: 10, 20 -> mean 15; without std only the mean is subtracted
    assert grouped([0.0, 10.0, 3.0, 20.0], [0, 1, 0, 1], normalize_std=False) == [-1.5, -5.0, 1.5, 5.0]


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -7.3, 1e6])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
def test_equal_rewards_have_advantage_exactly_zero(reward, kind):
    if kind == "rloo":
        advantages = left_out([reward] * 7, [0] * 7)
    elif kind == "reinforce_pp":
        values = torch.full((1000,), reward)  # enough for the sum of squares to be rounded
        advantages = whiten(values, moments(values))[:7].tolist()
    else:
        advantages = grouped([reward] * 7, [0] * 7, kind == "grpo")
    assert advantages == [0.0] * 7


@pytest.mark.parametrize("unscored", [NAN, INF, -INF])
def test_an_unscored_sequence_gets_advantage_zero_and_leaves_the_others_alone(unscored):
    # without it: 2, 0, 1 -> mean 1, std sqrt(2/3)
    step = 1 / math.sqrt(2 / 3)
    assert grouped([2.0, unscored, 0.0, 1.0], [0] * 4) == pytest.approx([step, 0, -step, 0], abs=1e-5)
    # the mean of the others: 0.5, 1.5, 1
    assert left_out([2.0, unscored, 0.0, 1.0], [0] * 4) == pytest.approx([1.5, 0, -1.5, 0])


def test_no_sequences_give_no_advantages():
    nothing = torch.zeros(0, dtype=torch.int64)
    assert group_advantages(torch.zeros(0), nothing, True).shape == (0,)
    assert leave_one_out_advantages(torch.zeros(0), nothing).shape == (0,)
    assert rewards_to_go(torch.zeros(0), torch.zeros(0), nothing).shape == (0,)
    advantages, returns = generalized_advantages(torch.zeros(0), torch.zeros(0), nothing, 1.0, 0.9)
    assert advantages.shape == returns.shape == (0,)
    assert moments(torch.zeros(0)).tolist() == [0, 0, 0]
    assert whiten(torch.zeros(0), torch.zeros(3)).shape == (0,)


scores = st.one_of(st.floats(-10, 10, width=32), st.sampled_from([NAN, 0.0, 1.0]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(scores, st.integers(0, 3)), min_size=1, max_size=20))
def test_group_advantages_agree_with_loops(pairs):
    rewards, groups = [r for r, _ in pairs], [g for _, g in pairs]
    relative, plain, rloo = grouped(rewards, groups), grouped(rewards, groups, False), left_out(rewards, groups)
    for i, (reward, group) in enumerate(pairs):
        mine = [r for r, g in pairs if g == group and math.isfinite(r)]
        others = [r for j, (r, g) in enumerate(pairs) if g == group and j != i and math.isfinite(r)]
        if not math.isfinite(reward) or not others:
            assert relative[i] == plain[i] == rloo[i] == 0
            continue
        centred = reward - statistics.fmean(mine)
        assert plain[i] == pytest.approx(centred, rel=1e-5, abs=1e-6)
        assert rloo[i] == pytest.approx(reward - statistics.fmean(others), rel=1e-5, abs=1e-6)
        assert relative[i] == pytest.approx(centred / (statistics.pstdev(mine) + 1e-6), rel=1e-4, abs=1e-4)


def test_a_lone_completion_has_no_leave_one_out_advantage():
    assert left_out([5.0, 1.0, 3.0], [0, 1, 1]) == [0, -2, 2]


def ragged(seed, count=5, longest=8):
    rng = random.Random(seed)
    return [[rng.gauss(0, 1) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def flat(sequences, order):
    """Values and sequence numbers as tensors, in ``order``."""
    pairs = [(x, s) for s, values in enumerate(sequences) for x in values]
    pairs = [pairs[i] for i in order]
    return torch.tensor([x for x, _ in pairs], dtype=torch.float64), torch.tensor([s for _, s in pairs])


@pytest.mark.parametrize("seed", range(4))
def test_sums_successors_and_sums_to_go_respect_sequences_however_they_are_interleaved(seed):
    sequences = ragged(seed)
    order = interleaved(sequences, seed)
    values, sequence = flat(sequences, order)
    sums, successors, to_go = [], [], []
    for xs in sequences:
        sums.append(sum(xs))
        successors += [*xs[1:], 0.0]
        to_go += [sum(0.9**k * x for k, x in enumerate(xs[t:])) for t in range(len(xs))]
    assert sequence_sums(values, sequence, 7).tolist() == pytest.approx([*sums, 0, 0])
    assert following(values, sequence).tolist() == [successors[i] for i in order]
    assert discounted_to_go(values, sequence, 0.9).tolist() == pytest.approx([to_go[i] for i in order])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (1.0, 1.0)])
def test_gae_is_the_exponentially_weighted_mean_of_k_step_advantages(gamma, lam):
    # arXiv:1506.02438: A^(k)_t = sum_{l<k} γ^l r_{t+l} + γ^k V_{t+k} - V_t; A = (1-λ) sum_k λ^(k-1) A^(k), and from the
    # end of the episode on all A^(k) are equal, so the last one carries the rest of the weight
    rewards, values = ragged(11), [[x * 0.7 - 0.1 for x in xs] for xs in ragged(11)]
    order = interleaved(rewards, 3)
    expected, returns = [], []
    for rs, vs in zip(rewards, values, strict=True):
        for t in range(len(rs)):
            left = len(rs) - t
            steps = []
            for k in range(1, left + 1):
                tail = gamma**k * vs[t + k] if t + k < len(vs) else 0.0
                steps.append(sum(gamma**i * rs[t + i] for i in range(k)) + tail - vs[t])
            mixed = (1 - lam) * sum(lam ** (k - 1) * a for k, a in enumerate(steps[:-1], 1)) + lam ** (
                left - 1
            ) * steps[-1]
            expected.append(mixed)
            returns.append(mixed + vs[t])
    rewards_M, sequence_M = flat(rewards, order)
    advantages_M, returns_M = generalized_advantages(rewards_M, flat(values, order)[0], sequence_M, gamma, lam)
    assert advantages_M.tolist() == pytest.approx([expected[i] for i in order], rel=1e-5, abs=1e-6)
    assert returns_M.tolist() == pytest.approx([returns[i] for i in order], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("unscored", [NAN, INF])
@pytest.mark.parametrize("lam", [0.0, 0.9])
def test_an_unscored_sequence_takes_no_part_in_gae_and_whitening(unscored, lam):
    rewards, values = torch.tensor([0.0, 1.0, 0.0, unscored, 3.0]), torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    sequence = torch.tensor([0, 0, 1, 1, 2])
    advantages, returns = generalized_advantages(rewards, values, sequence, 1.0, lam)
    scored = torch.tensor([True, True, False, False, True])
    assert torch.isnan(advantages[~scored]).all()
    assert torch.isnan(returns[~scored]).all()
    alone, _ = generalized_advantages(rewards[scored], values[scored], torch.tensor([0, 0, 1]), 1.0, lam)
    assert advantages[scored].tolist() == alone.tolist()
    whitened = whiten(advantages, moments(advantages))
    assert whitened[~scored].tolist() == [0, 0]
    assert whitened[scored].tolist() == whiten(alone, moments(alone)).tolist()


def test_reward_to_go_subtracts_the_penalties_still_to_come():
    # sequence 0: r = 1, penalties 0.1, 0.2, 0.3; sequence 1: r = 5, penalty 1; sequence 2 is not scored
    rewards, penalties = torch.tensor([1.0, 5.0, NAN]), torch.tensor([0.1, 1.0, 0.2, 7.0, 0.3])
    to_go = rewards_to_go(rewards, penalties, torch.tensor([0, 1, 0, 2, 0]))
    assert to_go[[0, 1, 2, 4]].tolist() == pytest.approx([0.4, 4.0, 0.5, 0.7])
    assert to_go[3].isnan()
    unscored = rewards_to_go(torch.tensor([-INF]), torch.tensor([0.5]), torch.tensor([0]))
    assert whiten(unscored, moments(torch.cat([to_go, unscored]))).tolist() == [0]


def test_whitening_over_ranks_has_mean_zero_and_deviation_one_over_the_whole_batch():
    # all: 1, 2, 3, 6 -> mean 3, std sqrt((4 + 1 + 0 + 9) / 4); the nan takes no part
    ranks = [torch.tensor([1.0, NAN, 2.0]), torch.tensor([3.0, 6.0])]
    total = moments(ranks[0]) + moments(ranks[1])
    assert total.dtype == torch.float64
    assert total.tolist() == [4, 12, 50]
    std = math.sqrt(3.5)
    assert whiten(ranks[0], total).tolist() == pytest.approx([-2 / std, 0, -1 / std], rel=1e-5)
    assert whiten(ranks[1], total).tolist() == pytest.approx([0, 3 / std], rel=1e-5)


def test_distillation_advantage_is_teacher_minus_student_and_has_no_gradient():
    student = torch.tensor([-1.0, -3.0], requires_grad=True)
    advantages = distillation_advantages(torch.tensor([-2.0, -0.5]), student)
    assert advantages.tolist() == [-1.0, 2.5]
    assert not advantages.requires_grad


def test_distillation_gradient_is_that_of_the_reverse_kl():
    # exact expectation over the vocabulary: sum_a p(a) · (-A_a) ∇log p(a) = ∇KL(p || q)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    student = logits.log_softmax(0)
    advantages = distillation_advantages(teacher, student).double()
    (-(student.detach().exp() * advantages) * student).sum().backward()
    policy_gradient, logits.grad = logits.grad, None
    student = logits.log_softmax(0)
    (student.exp() * (student - teacher)).sum().backward()
    assert policy_gradient.tolist() == pytest.approx(logits.grad.tolist(), abs=1e-7)


def test_overlong_penalty_is_a_slope_over_the_last_tokens():
    # longest 100, buffer 20: free up to 80, then down to -1 at 100
    penalties = overlong_penalty(torch.tensor([1, 80, 85, 90, 100, 120]), longest=100, buffer=20)
    assert penalties.tolist() == pytest.approx([0, 0, -0.25, -0.5, -1, -1])
