"""GAE and V-trace of fragments against loops over single environments, and against each other."""

from __future__ import annotations

import pytest
import torch

from learner.control.returns import generalized_advantages, next_values, vtrace

GAMMA, LAM = 0.9, 0.8


def steps(seed: int = 0, horizon: int = 9, num_envs: int = 40):
    """Random rewards, values and ends; a reset step follows half of the ends."""
    torch.manual_seed(seed)
    done = torch.rand(horizon, num_envs) < 0.25
    acted = torch.ones(horizon, num_envs, dtype=torch.bool)
    for t in range(1, horizon):
        acted[t, ::2] = ~(done[t - 1, ::2] & acted[t - 1, ::2])
        done[t] &= acted[t]
    truncated = done & (torch.rand(horizon, num_envs) < 0.5)
    return {
        "rewards": torch.randn(horizon, num_envs),
        "values": torch.randn(horizon, num_envs),
        "last": torch.randn(num_envs),
        "terminated": done & ~truncated,
        "truncated": truncated,
        "final": torch.randn(int(truncated.sum())),
        "acted": acted,
        "log_ratios": torch.randn(horizon, num_envs),
    }


def brute_force(s, lam, told=True, ratios=None, rho_max=1.0, c_max=1.0):
    """Sum over t from s on, as V-trace is written (eq. 1): no recursion, one environment at a time."""
    horizon, num_envs = s["rewards"].shape
    ratios = torch.ones(horizon, num_envs) if ratios is None else ratios
    final = {
        tuple(index): value for index, value in zip(s["truncated"].nonzero().tolist(), s["final"].tolist(), strict=True)
    }
    targets, advantages = s["values"].clone(), torch.zeros(horizon, num_envs)

    def following(t, n):
        if s["terminated"][t, n]:
            return 0.0
        if s["truncated"][t, n]:
            return final[t, n] if told else float(s["values"][t, n])
        return float(s["values"][t + 1, n] if t + 1 < horizon else s["last"][n])

    def over(t, n):
        return bool(s["terminated"][t, n] or s["truncated"][t, n] or not s["acted"][t, n])

    for n in range(num_envs):
        for start in reversed(range(horizon)):
            if not s["acted"][start, n]:
                continue
            weight = 1.0
            for t in range(start, horizon):
                error = float(s["rewards"][t, n]) + GAMMA * following(t, n) - float(s["values"][t, n])
                targets[start, n] += weight * min(rho_max, float(ratios[t, n])) * error
                weight *= GAMMA * lam * min(c_max, float(ratios[t, n]))
                if over(t, n):
                    break
            after = following(start, n)
            if start + 1 < horizon and not over(start, n):
                after += lam * float(targets[start + 1, n] - s["values"][start + 1, n])
            advantages[start, n] = s["rewards"][start, n] + GAMMA * after - s["values"][start, n]
    return advantages, targets


def following_of(s, told=True):
    index = s["truncated"].nonzero(as_tuple=True)
    return next_values(s["values"], s["last"], s["terminated"], s["truncated"], s["final"] if told else None, index)


def arguments(s, told=True):
    return s["rewards"], s["values"], following_of(s, told), s["terminated"] | s["truncated"], s["acted"]


@pytest.mark.parametrize("told", [True, False])
def test_gae_is_the_weighted_sum_of_temporal_differences_of_each_episode(told):
    s = steps()
    advantages, returns = generalized_advantages(*arguments(s, told), GAMMA, LAM)
    _, expected = brute_force(s, LAM, told)
    assert torch.allclose(returns, expected, atol=1e-5)
    assert torch.allclose(advantages, expected - s["values"], atol=1e-5)


@pytest.mark.parametrize(("rho_max", "c_max", "lam"), [(1.0, 1.0, 1.0), (2.0, 0.5, LAM), (1.3, 1.0, 0.0)])
def test_vtrace_is_equation_1_summed_for_each_environment(rho_max, c_max, lam):
    s = steps(seed=1)
    found = vtrace(s["log_ratios"], *arguments(s), GAMMA, lam, rho_max, c_max)
    expected = brute_force(s, lam, ratios=s["log_ratios"].exp(), rho_max=rho_max, c_max=c_max)
    for got, wanted in zip(found, expected, strict=True):
        assert torch.allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("lam", [0.0, LAM, 1.0])
def test_vtrace_on_policy_is_gae(lam):
    s = steps(seed=2)
    on_policy = vtrace(torch.zeros_like(s["rewards"]), *arguments(s), GAMMA, lam, 1.0, 1.0)
    for got, wanted in zip(on_policy, generalized_advantages(*arguments(s), GAMMA, lam), strict=True):
        assert torch.allclose(got, wanted, atol=1e-6)


def test_without_discount_of_the_trace_returns_are_discounted_sums_of_rewards():
    # one environment, λ = 1: 1 + 0.9 (2 + 0.9 (3 + 0.9 · 10)) = 12.52 whatever the values are
    rewards, values = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[5.0], [-7.0], [2.0]])
    no = torch.zeros(3, 1, dtype=torch.bool)
    none = (torch.empty(0, dtype=torch.long),) * 2
    following = next_values(values, torch.tensor([10.0]), no, no, None, none)
    advantages, returns = generalized_advantages(rewards, values, following, no, ~no, 0.9, 1.0)
    assert returns[0].item() == pytest.approx(12.52)
    assert advantages[1].item() == pytest.approx(2 + 0.9 * (3 + 0.9 * 10) + 7)


def test_nothing_is_expected_behind_a_termination_and_the_critics_word_behind_a_truncation():
    values, last = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]), torch.tensor([7.0, 7.0, 7.0])
    terminated = torch.tensor([[True, False, False], [False, False, False]])
    truncated = torch.tensor([[False, True, False], [False, False, True]])
    told = next_values(values, last, terminated, truncated, torch.tensor([4.0, 5.0]), truncated.nonzero(as_tuple=True))
    assert told.tolist() == [[0.0, 4.0, 2.0], [7.0, 7.0, 5.0]]
    # not told: the value before the step, as rsl_rl adds it to the reward
    untold = next_values(values, last, terminated, truncated, None, truncated.nonzero(as_tuple=True))
    assert untold.tolist() == [[0.0, 1.0, 2.0], [7.0, 7.0, 2.0]]


def test_reset_steps_have_no_advantage_and_leave_those_before_alone():
    s = steps(seed=3)
    advantages, returns = generalized_advantages(*arguments(s), GAMMA, LAM)
    resets = ~s["acted"]
    assert resets.any()
    assert not advantages[resets].any()
    assert torch.equal(returns[resets], s["values"][resets])
    s["rewards"][resets] += 100.0
    again, _ = generalized_advantages(*arguments(s), GAMMA, LAM)
    assert torch.equal(again, advantages)


def test_ratios_that_overflow_are_cut():
    s = steps(seed=4)
    s["log_ratios"].fill_(200.0)
    for found in vtrace(s["log_ratios"], *arguments(s), GAMMA, LAM, 1.5, 1.0):
        assert found.isfinite().all()
