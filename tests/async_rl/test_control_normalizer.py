"""The running statistics against numpy over everything at once, and against rsl_rl's own."""

import numpy as np
import pytest
import torch

from async_rl.control.normalizer import Normalizer

D = 4


def data(count=300, offset=0.0):
    rng = np.random.default_rng(0)
    return torch.from_numpy((rng.normal(size=(count, D)) * [0.1, 1, 10, 3] + offset).astype(np.float32))


def check(normalizer, x, rtol=1e-5):
    wanted = x.double().numpy()
    np.testing.assert_allclose(normalizer.mean.numpy(), wanted.mean(0), rtol=rtol, atol=1e-5)
    np.testing.assert_allclose(normalizer.var.numpy(), wanted.var(0), rtol=rtol)
    assert float(normalizer.count) == len(wanted)


@pytest.mark.parametrize("sizes", [(300,), (1, 299), (100, 100, 100), (7, 0, 250, 43), (299, 1)])
def test_any_split_gives_the_statistics_of_everything(sizes):
    x = data(offset=5.0)
    normalizer = Normalizer(D)
    for part in x.split(list(sizes)):
        normalizer.update(normalizer.moments(part))
    check(normalizer, x)


def test_moments_add_up_over_ranks():
    x = data()
    normalizer = Normalizer(D)
    normalizer.update(normalizer.moments(x[:50]))
    normalizer.update(sum(normalizer.moments(part) for part in x[50:].split([10, 200, 40])))
    check(normalizer, x)


def test_merge_takes_a_batch_by_its_statistics():
    x = data()
    normalizer = Normalizer(D)
    for part in (x[:100], x[100:]):
        mean, var = part.double().mean(0), part.double().var(0, unbiased=False)
        normalizer.merge(torch.tensor(float(len(part))), mean, var)
    check(normalizer, x)


def test_masked_samples_do_not_count():
    x = data().view(3, 100, D)
    mask = torch.rand(3, 100, generator=torch.Generator().manual_seed(0)) < 0.3
    kept = x[mask]
    x = torch.where(mask.unsqueeze(-1), x, 1e6)
    normalizer = Normalizer(D)
    normalizer.update(normalizer.moments(x, mask))
    check(normalizer, kept)


def test_no_digits_cancel_when_the_mean_is_far_from_zero():
    x = data(count=20_000, offset=10_000.0)
    normalizer = Normalizer(D)
    for part in x.split(5_000):
        normalizer.update(normalizer.moments(part))
    check(normalizer, x, rtol=2e-3)  # x itself has steps of 0.001, a hundredth of the smallest deviation


def test_nothing_changes_without_samples():
    normalizer = Normalizer(D)
    normalizer.update(normalizer.moments(torch.zeros(0, D)))
    normalizer.update(normalizer.moments(data(), torch.zeros(300, dtype=torch.bool)))
    assert torch.equal(normalizer.mean, torch.zeros(D))
    assert torch.equal(normalizer.var, torch.ones(D))
    assert float(normalizer.count) == 0


def test_forward_divides_by_the_deviation_and_a_hundredth():
    normalizer = Normalizer(2)
    normalizer.mean.copy_(torch.tensor([1.0, 0.0]))
    normalizer.var.copy_(torch.tensor([4.0, 0.0]))
    got = normalizer(torch.tensor([[[5.02, 0.5]]]))
    torch.testing.assert_close(got, torch.tensor([[[4.02 / 2.01, 50.0]]]))


def test_it_agrees_with_rsl_rl():
    modules = pytest.importorskip("rsl_rl.modules")
    theirs, ours = modules.EmpiricalNormalization(D), Normalizer(D)
    x = data(offset=2.0)
    for part in x.split(100):
        theirs.update(part)
        ours.update(ours.moments(part))
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_everything_it_knows_is_float32_and_in_its_state():
    state = Normalizer(D).state_dict()
    assert {name: (tuple(t.shape), t.dtype) for name, t in state.items()} == {
        "mean": ((D,), torch.float32),
        "var": ((D,), torch.float32),
        "count": ((), torch.float32),
    }
