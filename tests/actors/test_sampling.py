"""Inverse-CDF sampling, against values worked by hand."""

import math

import numpy as np
import pytest
import torch

from actors.engines.sampling import sample_tokens, uniforms


def draw(probabilities, u, temperature=1.0):
    """Tokens and log-probabilities of one row."""
    logits = torch.tensor([probabilities], dtype=torch.float64).log().float()
    tokens, logprobs = sample_tokens(logits, np.float32([temperature]), np.float64([u]))
    assert logprobs.dtype == torch.float32
    return tokens[0].tolist(), logprobs[0].tolist()


def test_the_token_is_the_first_whose_cumulative_probability_exceeds_u():
    # cumulative: 0.1 0.3 0.6 1.0
    tokens, logprobs = draw([0.1, 0.2, 0.3, 0.4], [0.0, 0.09, 0.11, 0.29, 0.31, 0.59, 0.61, 0.99])
    assert tokens == [0, 0, 1, 1, 2, 2, 3, 3]
    expected = [math.log([0.1, 0.2, 0.3, 0.4][t]) for t in tokens]
    assert logprobs == pytest.approx(expected, abs=1e-6)


def test_tokens_of_probability_zero_are_never_drawn():
    below_one = np.nextafter(1.0, 0.0)
    tokens, logprobs = draw([0.0, 0.5, 0.0, 0.5, 0.0, 0.0], [0.0, 0.49, 0.51, below_one])
    assert tokens == [1, 1, 3, 3]
    assert np.isfinite(logprobs).all()
    for size in range(3, 60):  # sums that round below and above 1
        p = np.random.default_rng(size).random(size)
        p[-2:] = 0
        assert draw(list(p / p.sum()), [below_one])[0] == [size - 3]


def test_equally_spaced_numbers_give_each_token_its_share():
    p = [0.05, 0.25, 0.4, 0.3]
    tokens, _ = draw(p, (np.arange(1000) + 0.5) / 1000)
    assert np.abs(np.bincount(tokens) - 1000 * np.asarray(p)).max() <= 1


def test_the_end_of_a_large_vocabulary_is_reached():
    # 200,000 equal probabilities: token i covers [i, i + 1) / 200,000; a float32 sum of them is off by far more
    size = 200_000
    picks = [0, 77_777, 150_001, size - 1]
    tokens, _ = sample_tokens(torch.zeros(1, size), np.float32([1]), np.float64([[(i + 0.5) / size for i in picks]]))
    assert np.abs(np.asarray(tokens[0]) - picks).max() <= 1


def test_temperature_divides_the_logits_and_is_in_the_logprobs():
    # at temperature 0.5 probabilities are squared: 1/16, 9/16 of (1/4, 3/4) -> 0.1, 0.9
    tokens, logprobs = draw([0.25, 0.75], [0.09, 0.11], temperature=0.5)
    assert tokens == [0, 1]
    assert logprobs == pytest.approx([math.log(0.1), math.log(0.9)], abs=1e-6)


def test_temperature_zero_is_greedy_beside_rows_that_are_not():
    logits = torch.tensor([[0.1, 0.6, 0.3], [0.1, 0.6, 0.3]]).log()
    u = np.float64([[0.95, 0.95], [0.95, 0.05]])
    tokens, logprobs = sample_tokens(logits, np.float32([0, 1]), u)
    assert tokens.tolist() == [[1, 1], [2, 0]]
    assert logprobs[0].tolist() == pytest.approx([math.log(0.6)] * 2, abs=1e-6)
    tokens, _ = sample_tokens(logits, np.float32([0, 0]), u)
    assert tokens.tolist() == [[1, 1], [1, 1]]


def test_bfloat16_logits_give_float32_logprobs():
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    _, logprobs = sample_tokens(logits, np.float32([1]), np.float64([[0.999]]))
    expected = 3 - math.log(sum(math.exp(x) for x in (1, 2, 3)))
    assert logprobs.item() == pytest.approx(expected, abs=1e-6)


def test_logits_that_are_no_numbers_give_a_valid_index_and_a_logprob_that_tells():
    tokens, logprobs = sample_tokens(torch.full((1, 5), math.nan), np.float32([1]), np.float64([[0.5]]))
    assert 0 <= tokens.item() < 5
    assert math.isnan(logprobs.item())


def test_uniform_numbers_are_those_of_philox_at_the_samples_counter():
    numbers = uniforms((3, 14, 0), first=2, num_samples=3, count=6)
    again = uniforms((3, 14, 0), first=0, num_samples=5, count=6)
    np.testing.assert_array_equal(numbers, again[2:5])
    import hashlib

    key = int.from_bytes(hashlib.blake2b(b"(3, 14, 0)", digest_size=16).digest(), "little")
    for sample in range(5):
        philox = np.random.Philox(key=key, counter=[0, sample, 0, 0])
        np.testing.assert_array_equal(again[sample], np.random.Generator(philox).random(6))


def test_streams_differ_by_seed_and_sample_and_begin_alike_at_any_length():
    base = uniforms((0, 1, 0), 0, 4, 7)
    np.testing.assert_array_equal(base[:, :3], uniforms((0, 1, 0), 0, 4, 3))
    others = [uniforms(seed, 0, 4, 7) for seed in ((0, 1, 1), (1, 1, 0), (0, 10), (-1, 2**70))]
    assert len(np.unique(np.concatenate([base, *others]))) == 5 * 4 * 7
    assert base.min() >= 0
    assert base.max() < 1
