"""Distributions against torch.distributions and against numbers worked by hand."""

import math

import pytest
import torch
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Normal, kl_divergence

from async_rl.control.distributions import Categorical, Gaussian

B, A = 7, 3
LOG_SQRT_2PI = 0.9189385332


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def gaussians(per_state):
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(B, A, generator=generator)
    std = torch.rand((B, A) if per_state else (A,), generator=generator) + 0.1
    actions = torch.randn(B, A, generator=generator) * 2
    return mean, std, actions


@pytest.mark.parametrize("per_state", [False, True])
def test_gaussian_agrees_with_torch(per_state):
    mean, std, actions = gaussians(per_state)
    ours, theirs = Gaussian(mean, std), Normal(mean, std)
    close(ours.log_prob(actions), theirs.log_prob(actions).sum(-1))
    close(ours.log_prob_parts(actions), theirs.log_prob(actions))
    close(ours.entropy(), theirs.entropy().sum(-1))
    assert ours.entropy().shape == (B,)
    assert torch.equal(ours.mode(), mean)
    close(ours.noise(), std.mean())


@pytest.mark.parametrize("per_state", [False, True])
@pytest.mark.parametrize("old_per_state", [False, True])
def test_kl_of_gaussians_agrees_with_torch_and_is_from_old_to_new(per_state, old_per_state):
    mean, std, other = gaussians(per_state)
    old_std = gaussians(old_per_state)[1] * 1.7
    new, old = Gaussian(mean, std), Gaussian(other, old_std)
    wanted = kl_divergence(Normal(other, old_std), Normal(mean, std)).sum(-1)
    close(new.kl_from(old), wanted)
    close(old.kl_from(old), torch.zeros(B))


def test_gaussian_numbers_worked_by_hand():
    new, old = (
        Gaussian(torch.tensor([[1.0]]), torch.tensor([2.0])),
        Gaussian(torch.tensor([[0.0]]), torch.tensor([1.0])),
    )
    # z = (3 - 1) / 2 = 1: -1/2 - log 2 - log sqrt(2 pi)
    close(new.log_prob(torch.tensor([[3.0]])), torch.tensor([-0.5 - math.log(2) - LOG_SQRT_2PI]))
    close(new.entropy(), torch.tensor([0.5 + math.log(2) + LOG_SQRT_2PI]))
    # log(2 / 1) + (1 + 1) / (2 * 4) - 1/2
    close(new.kl_from(old), torch.tensor([math.log(2) + 0.25 - 0.5]))


def test_gradients_of_a_gaussian_agree_with_torch():
    mean, std, actions = gaussians(False)
    found = []
    for make in (Gaussian, Normal):
        own_mean, own_std = mean.clone().requires_grad_(), std.clone().requires_grad_()
        made = make(own_mean, own_std)
        log_prob, entropy = made.log_prob(actions), made.entropy()
        if make is Normal:
            log_prob, entropy = log_prob.sum(-1), entropy.sum(-1)
        (log_prob.exp().sum() + entropy.sum()).backward()
        found.append((own_mean.grad, own_std.grad))
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)


def test_gaussian_samples_follow_mean_and_deviation_and_carry_no_gradient():
    mean = torch.tensor([1.0, -2.0]).expand(40_000, 2).requires_grad_()
    made = Gaussian(mean, torch.tensor([0.5, 3.0], requires_grad=True))
    drawn = made.sample(torch.Generator().manual_seed(3))
    assert not drawn.requires_grad
    assert drawn.dtype == torch.float32
    torch.testing.assert_close(drawn.mean(0), torch.tensor([1.0, -2.0]), rtol=0, atol=5 * 3 / 200)
    torch.testing.assert_close(drawn.std(0), torch.tensor([0.5, 3.0]), rtol=0.03, atol=0)
    assert torch.equal(drawn, made.sample(torch.Generator().manual_seed(3)))
    assert not torch.equal(drawn, made.sample(torch.Generator().manual_seed(4)))


@pytest.mark.parametrize("choices", [(4,), (5, 5), (3, 5, 2)])
def test_categorical_agrees_with_torch_part_by_part(choices):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(B, sum(choices), generator=generator, requires_grad=True)
    old_logits = torch.randn(B, sum(choices), generator=generator)
    ours, old = Categorical(logits, choices), Categorical(old_logits, choices)
    parts = [TorchCategorical(logits=part) for part in logits.split(choices, -1)]
    old_parts = [TorchCategorical(logits=part) for part in old_logits.split(choices, -1)]
    actions = ours.sample(generator)
    assert actions.shape == (B, len(choices))
    assert actions.dtype == torch.int64
    log_probs = torch.stack([part.log_prob(actions[:, i]) for i, part in enumerate(parts)], -1)
    entropy = sum(part.entropy() for part in parts)
    close(ours.log_prob_parts(actions), log_probs)
    close(ours.log_prob(actions), log_probs.sum(-1))
    close(ours.entropy(), entropy)
    close(ours.kl_from(old), sum(kl_divergence(o, n) for o, n in zip(old_parts, parts, strict=True)))
    assert torch.equal(ours.mode(), torch.stack([part.probs.argmax(-1) for part in parts], -1))
    assert ours.noise() is None
    wanted = torch.autograd.grad(log_probs.exp().sum() + entropy.sum(), logits)[0]
    close(torch.autograd.grad(ours.log_prob_parts(actions).exp().sum() + ours.entropy().sum(), logits)[0], wanted)


def test_categorical_numbers_worked_by_hand():
    new = Categorical(torch.tensor([[0.0, math.log(3)]]), (2,))  # 1/4, 3/4
    old = Categorical(torch.tensor([[0.0, 0.0]]), (2,))
    close(new.log_prob(torch.tensor([[1]])), torch.tensor([math.log(0.75)]))
    close(new.entropy(), torch.tensor([0.25 * math.log(4) + 0.75 * math.log(4 / 3)]))
    close(new.kl_from(old), torch.tensor([0.5 * math.log(2) + 0.5 * math.log(2 / 3)]))
    close(new.parameters[0].exp(), torch.tensor([[0.25, 0.75]]))


def test_categorical_samples_are_as_frequent_as_they_are_probable():
    probabilities = torch.tensor([0.1, 0.2, 0.7, 0.6, 0.4])
    made = Categorical(probabilities.log().expand(40_000, 5), (3, 2))
    drawn = made.sample(torch.Generator().manual_seed(0))
    counts = torch.cat([torch.bincount(drawn[:, 0], minlength=3), torch.bincount(drawn[:, 1], minlength=2)])
    torch.testing.assert_close(counts / 40_000, probabilities, rtol=0, atol=0.0125)  # 5 standard errors


def test_rounding_of_the_distribution_function_never_picks_a_choice_that_does_not_exist(monkeypatch):
    logits = torch.randn(2000, 5, generator=torch.Generator().manual_seed(0))
    made = Categorical(logits, (3, 2))
    totals = made.log_probs.exp().cumsum(-1)[..., -1]
    largest = 1 - 2**-24
    assert (totals <= largest).any(), "no row whose rounded total lies below the largest uniform number"
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, largest))
    drawn = made.sample()
    assert (drawn[:, 0] == 2).all()
    assert (drawn[:, 1] == 1).all()


@pytest.mark.parametrize("kind", ["state", "one std", "categorical"])
def test_batch_axes_can_be_flattened_and_indexed(kind):
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(4, B, 6, generator=generator, requires_grad=True)
    if kind == "categorical":
        made, actions = Categorical(first, (2, 4)), torch.stack([torch.ones(4, B), torch.full((4, B), 3)], -1).long()
    else:
        std = torch.rand((4, B, 6) if kind == "state" else (6,), generator=generator) + 0.5
        made, actions = Gaussian(first, std), torch.randn(4, B, 6, generator=generator)
    whole = made.log_prob(actions)
    index = torch.tensor([20, 3, 3])
    close(made.flatten().log_prob(actions.flatten(0, 1)), whole.flatten())
    close(made.flatten()[index].log_prob(actions.flatten(0, 1)[index]), whole.flatten()[index])
    close(made[:, 2:4].entropy(), made.entropy()[:, 2:4])
    close(made[1].kl_from(made[0]), made[1:2].kl_from(made[0:1])[0])
    detached = made.detach()
    assert whole.requires_grad
    assert not any(tensor.requires_grad for tensor in detached.parameters)
    close(detached.log_prob(actions), whole.detach())
