"""Losses per token and their aggregation, against numbers worked by hand."""

import math

import pytest
import torch

from learner.algorithms.aggregate import aggregate
from learner.algorithms.cispo import cispo_loss
from learner.algorithms.gspo import gspo_loss
from learner.algorithms.importance import importance_loss
from learner.algorithms.kl import adapt_kl_coef, kl_estimate
from learner.algorithms.ppo import ppo_loss
from learner.algorithms.value import value_loss


def test_clip_cuts_only_the_side_that_would_be_rewarded():
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    logprobs = ratios.log().requires_grad_()
    loss, clipped = ppo_loss(
        logprobs, torch.zeros(5), torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0]), clip_low=0.2, clip_high=0.3
    )
    # 1.5, A=1: min(1.5, 1.3) -> -1.3, cut.   1.5, A=-1: min(-1.5, -1.3) -> 1.5.
    # 0.5, A=1: min(0.5, 0.8) -> -0.5.        0.5, A=-1: min(-0.5, -0.8) -> 0.8, cut.   1.1, A=2: -2.2.
    assert loss.tolist() == pytest.approx([-1.3, 1.5, -0.5, 0.8, -2.2])
    assert clipped.tolist() == [True, False, False, True, False]
    loss.sum().backward()
    # d(-r A)/dlogp = -r A where it is not cut
    assert logprobs.grad.tolist() == pytest.approx([0, 1.5, -0.5, 0, -2.2])


def test_dual_clip_bounds_negative_advantages_only():
    logprobs = torch.tensor([5.0, 2.0, 5.0]).log().requires_grad_()
    loss, clipped = ppo_loss(logprobs, torch.zeros(3), torch.tensor([-1.0, -1.0, 1.0]), 0.2, 0.2, dual_clip=3.0)
    # 5, A=-1: max(-5, -3) -> 3, cut.   2, A=-1: max(-2, -3) -> 2.   5, A=1: min(5, 1.2) -> -1.2, cut by the other clip.
    assert loss.tolist() == pytest.approx([3, 2, -1.2])
    assert clipped.tolist() == [True, False, True]
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0, 2, 0])


def test_at_ratio_one_the_gradient_is_that_of_the_plain_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, _ = ppo_loss(logprobs, logprobs.detach(), torch.tensor([0.7, -0.3]), 0.2, 0.2)
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.7, 0.3])


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    logprobs = torch.tensor([3.0, 0.1, 1.0]).log().requires_grad_()
    loss, clipped = cispo_loss(logprobs, torch.zeros(3), torch.tensor([2.0, -1.0, 1.0]), clip_low=1.0, clip_high=0.5)
    # weight 1.5 instead of 3; 0.1 as it is, since clip_low = 1 leaves the lower side open
    assert loss.tolist() == pytest.approx([-1.5 * 2 * math.log(3), 0.1 * math.log(0.1), 0.0], abs=1e-6)
    assert clipped.tolist() == [True, False, False]
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-3.0, 0.1, -1.0])


def test_gspo_gives_each_token_the_geometric_mean_of_its_sequence():
    # sequence 0: ratios 1 and 1.21 -> s = 1.1;  sequence 1: ratio 2, above 1.2
    logprobs = torch.tensor([1.0, 2.0, 1.21]).log().requires_grad_()
    sequence, kept = torch.tensor([0, 1, 0]), torch.tensor([True] * 3)
    loss, clipped = gspo_loss(logprobs, torch.zeros(3), torch.tensor([1.0, 3.0, 1.0]), sequence, 2, 0.2, 0.2, kept)
    assert loss.tolist() == pytest.approx([-1.1, -3.6, -1.1])
    assert clipped.tolist() == [False, True, False]
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.1, 0, -1.1])


def test_gspo_leaves_masked_tokens_out_of_the_geometric_mean():
    # sequence 0: ratios 4 and (masked) 9 -> s = 4
    logprobs = torch.tensor([4.0, 9.0]).log()
    sequence, kept = torch.tensor([0, 0]), torch.tensor([True, False])
    loss, _ = gspo_loss(logprobs, torch.zeros(2), torch.tensor([1.0, 1.0]), sequence, 1, 0.9, 9.0, kept)
    assert loss[0].item() == pytest.approx(-4)


def test_importance_weighting_is_never_clipped():
    logprobs = torch.tensor([100.0, 0.01]).log().requires_grad_()
    loss, clipped = importance_loss(logprobs, torch.zeros(2), torch.tensor([1.0, -2.0]))
    assert loss.tolist() == pytest.approx([-100, 0.02])
    assert not clipped.any()
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-100, 0.02])


def test_value_loss_takes_the_worse_of_the_value_and_its_clipped_move():
    values = torch.tensor([2.0, 0.0, 1.1, 0.0], requires_grad=True)
    old, returns = torch.tensor([1.0, 1.0, 1.0, 5.0]), torch.tensor([2.0, 2.0, 2.0, math.nan])
    loss, clipped = value_loss(values, old, returns, clip=0.5)
    # 2 -> clipped to 1.5: max(0, 0.25), cut.   0 -> 0.5: max(4, 2.25).   1.1 stays: 0.81.   not scored: 0.
    assert loss.tolist() == pytest.approx([0.25, 4.0, 0.81, 0.0])
    assert clipped.tolist() == [True, False, False, False]
    loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([0, -4, -1.8, 0])
    assert value_loss(values, old, returns, clip=0.0)[0].tolist() == pytest.approx([0, 4, 0.81, 0])


def test_kl_estimators_by_hand():
    # d = log ref - log π = ln 2, 0, -ln 2
    logprobs, reference = torch.tensor([0.0, -1.0, 0.0]), torch.tensor([math.log(2), -1.0, -math.log(2)])
    ln2 = math.log(2)
    assert kl_estimate("k1", logprobs, reference).tolist() == pytest.approx([-ln2, 0, ln2])
    assert kl_estimate("k2", logprobs, reference).tolist() == pytest.approx([ln2**2 / 2, 0, ln2**2 / 2])
    assert kl_estimate("k3", logprobs, reference).tolist() == pytest.approx([1 - ln2, 0, ln2 - 0.5], abs=1e-6)


def test_k1_and_k3_are_unbiased_and_the_gradients_are_those_that_the_docs_say():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    weights = logprobs.detach().exp()
    for estimator in ("k1", "k3"):
        mean = (weights * kl_estimate(estimator, logprobs, reference)).sum()
        assert mean.item() == pytest.approx(exact.item())
    (of_kl,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (of_k1,) = torch.autograd.grad((weights * kl_estimate("k1", logprobs, reference)).sum(), logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad((weights * kl_estimate("k2", logprobs, reference)).sum(), logits, retain_graph=True)
    (of_k3,) = torch.autograd.grad((weights * kl_estimate("k3", logprobs, reference)).sum(), logits, retain_graph=True)
    (of_forward,) = torch.autograd.grad((reference.exp() * (reference - logprobs)).sum(), logits)
    assert of_k3.tolist() == pytest.approx(of_forward.tolist())
    assert of_k2.tolist() == pytest.approx(of_kl.tolist())
    assert of_k1.tolist() == pytest.approx([0] * 9, abs=1e-12)  # why k1 is refused in the loss


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.05, 0.1),  # on target
        (0.055, 0.1 * 1.01),  # error 0.1
        (0.2, 0.1 * 1.02),  # error 3, clipped to 0.2
        (0.0, 0.1 * 0.98),  # error -1, clipped to -0.2
    ],
)
def test_the_kl_coefficient_follows_a_clipped_proportional_error(kl, expected):
    assert adapt_kl_coef(0.1, kl, target=0.05) == pytest.approx(expected)


def test_aggregations_divide_by_global_counts():
    values, lengths = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([2.0, 2.0, 1.0])
    # tokens: 9 / 10.  sequences: ((1 + 2) / 2 + 6) / 4 = 1.875.  constant: 9 / (4 · 5)
    assert aggregate(values, lengths, "token", 10, 4, 5).item() == pytest.approx(0.9)
    assert aggregate(values, lengths, "sequence", 10, 4, 5).item() == pytest.approx(1.875)
    assert aggregate(values, lengths, "constant", 10, 4, 5).item() == pytest.approx(0.45)
