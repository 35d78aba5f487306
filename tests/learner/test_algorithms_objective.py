"""The whole objective against a textbook version in Python floats, and what must not change it."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import (
    counts_of,
    interleaved,
    micro_batch,
    naive_gradient,
    naive_kl,
    naive_objective,
    naive_value_loss,
    naive_weights,
    random_sequences,
    run_objective,
)

from async_rl.config import AlgorithmConfig, parse_config
from async_rl.config.recipes import RECIPES
from learner.algorithms.objective import Counts, objective, sum_sizes

LOSSES = {
    "ppo": {},
    "clip_higher": {"clip_high": 0.28},
    "dual_clip": {"dual_clip": 1.5},
    "gspo": {"loss": "gspo", "aggregation": "sequence", "clip_low": 0.1, "clip_high": 0.15},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.3},
    "cispo_both_sides": {"loss": "cispo", "clip_low": 0.3, "clip_high": 0.3},
    "importance": {"loss": "importance"},
}
CORRECTIONS = {
    "none": {},
    "truncate": {"correction": "truncate", "correction_high": 1.2},
    "mask": {"correction": "mask", "correction_low": 0.7, "correction_high": 1.4},
    "sequence_mask": {"correction": "sequence_mask", "correction_low": 0.4, "correction_high": 2.5},
    "geometric_mask": {"correction": "geometric_mask", "correction_low": 0.8, "correction_high": 1.25},
}
AGES = {"age_decay": 0.8, "max_token_age": 2}


def agrees(sequences, algorithm, order=None):
    counts = counts_of(sequences)
    loss, gradient, _ = run_objective(sequences, algorithm, counts, order)
    assert loss == pytest.approx(
        naive_objective(sequences, sequences, algorithm, counts), rel=1e-7
    )  # age weights are float32
    expected = naive_gradient(sequences, algorithm, counts)
    if order is not None:
        expected = [expected[i] for i in order]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", LOSSES)
def test_each_policy_loss_and_its_gradient_agree_with_the_textbook(loss, seed):
    agrees(random_sequences(seed), AlgorithmConfig(**LOSSES[loss]))


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("loss", ["ppo", "cispo", "importance"])
def test_each_aggregation_agrees_with_the_textbook(loss, aggregation):
    agrees(random_sequences(10), AlgorithmConfig(**{**LOSSES[loss], "aggregation": aggregation}))


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("proximal", ["recomputed", "interpolated"])
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "importance"])
def test_each_correction_of_each_loss_agrees_with_the_textbook(loss, proximal, correction):
    algorithm = AlgorithmConfig(**LOSSES[loss], proximal=proximal, **CORRECTIONS[correction])
    agrees(random_sequences(20, count=8), algorithm)
    agrees(random_sequences(21, count=8), algorithm.model_copy(update=AGES))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_entropy_and_value_terms_agree_with_the_textbook(estimator):
    algorithm = AlgorithmConfig(
        advantage="gae", kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.1, value_coef=0.7, value_clip=0.4
    )
    sequences = random_sequences(30)
    counts = counts_of(sequences)
    agrees(sequences, algorithm)
    batch, outputs = micro_batch(sequences)
    loss, sums = objective(batch, outputs, algorithm, counts, algorithm.kl_coef, num_ages=6)
    loss.backward()
    for name, field in (("entropy_M", "entropy"), ("values_M", "value")):
        expected = naive_gradient(sequences, algorithm, counts, field)
        assert getattr(outputs, name).grad.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-8)
    tokens = [t for s in sequences for t in s]
    kl = sum(naive_kl(t, estimator) for t in tokens) / counts.num_tokens
    assert sums["loss_kl"].item() == pytest.approx(0.3 * kl)
    value = sum(naive_value_loss(t, 0.4) for t in tokens) / counts.num_tokens
    assert sums["loss_value"].item() == pytest.approx(0.7 * value)
    assert sums["kl_ref"].item() == pytest.approx(sum(naive_kl(t, "k3") for t in tokens))
    assert sums["value_error"].item() == pytest.approx(sum((t.value - t.target) ** 2 for t in tokens))
    assert sums["returns"].item() == pytest.approx(sum(t.target for t in tokens))
    assert sums["returns_squared"].item() == pytest.approx(sum(t.target**2 for t in tokens))
    assert sums["value_tokens"].item() == len(tokens)


@pytest.mark.parametrize("mask", [{}, {"max_token_age": 2}])
def test_gspo_is_the_papers_mean_over_sequences_in_value_and_gradient(mask):
    # the paper's own form: one differentiable ratio per sequence, no token-level stop-gradient
    algorithm = AlgorithmConfig(**LOSSES["gspo"], **mask)
    sequences = random_sequences(40, one_advantage=True, spread=0.2)
    loss, gradient, _ = run_objective(sequences, algorithm)
    logprobs = [torch.tensor([t.logprob for t in s], dtype=torch.float64, requires_grad=True) for s in sequences]
    total = torch.zeros((), dtype=torch.float64)
    for tokens, now in zip(sequences, logprobs, strict=True):
        kept = [i for i, t in enumerate(tokens) if not mask or t.age <= 2]
        if kept:
            length = len(kept)
            ratio = torch.exp(sum(now[i] - tokens[i].behaviour for i in kept) / length)
            advantage = tokens[0].advantage
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.15) * advantage)
            total = total - surrogate * (length / len(tokens)) / len(sequences)
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-12)
    expected = torch.cat([torch.zeros_like(p) if p.grad is None else p.grad for p in logprobs])
    assert gradient.tolist() == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_the_grpo_recipe_is_the_clipped_ratio_to_the_behaviour_plus_beta_k3(aggregation, beta):
    algorithm = parse_config({"algorithm": {"name": "grpo", "aggregation": aggregation, "kl_coef": beta}}).algorithm
    sequences = random_sequences(50)
    expected = 0.0
    for tokens in sequences:
        for t in tokens:
            r, d = math.exp(t.logprob - t.behaviour), t.reference - t.logprob
            term = -min(r * t.advantage, max(0.8, min(1.2, r)) * t.advantage) + beta * (math.exp(d) - 1 - d)
            expected += term / (len(tokens) * len(sequences) if aggregation == "sequence" else sum(map(len, sequences)))
    assert run_objective(sequences, algorithm)[0] == pytest.approx(expected, rel=1e-12)


EVERYTHING = {
    "ppo": AlgorithmConfig(advantage="gae", kl_coef=0.1, entropy_coef=0.1, proximal="recomputed", **AGES),
    "gspo": AlgorithmConfig(**LOSSES["gspo"], proximal="recomputed", **CORRECTIONS["geometric_mask"]),
    "cispo": AlgorithmConfig(**LOSSES["cispo"], aggregation="constant", proximal="interpolated"),
    "sequence_mask": AlgorithmConfig(aggregation="sequence", proximal="recomputed", **CORRECTIONS["sequence_mask"]),
}


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), name=st.sampled_from(sorted(EVERYTHING)), seed=st.integers(0, 1000))
def test_any_split_into_micro_batches_and_any_interleaving_adds_up_to_the_same(data, name, seed):
    algorithm, sequences = EVERYTHING[name], random_sequences(seed, count=5)
    counts = counts_of(sequences)
    whole_loss, whole_gradient, whole_sums = run_objective(sequences, algorithm, counts)
    part_of = data.draw(st.lists(st.integers(0, 2), min_size=5, max_size=5))
    offsets = [sum(map(len, sequences[:i])) for i in range(5)]
    loss, sums, gradient = 0.0, {}, torch.zeros_like(whole_gradient)
    for part in sorted(set(part_of)):
        chosen = [i for i in range(5) if part_of[i] == part]
        mine = [sequences[i] for i in chosen]
        order = interleaved(mine, seed)
        part_loss, part_gradient, part_sums = run_objective(mine, algorithm, counts, order)
        loss += part_loss
        sums = {k: sums.get(k, 0) + v for k, v in part_sums.items()}
        places = [offsets[i] + t for i in chosen for t in range(len(sequences[i]))]
        gradient[[places[j] for j in order]] = part_gradient
    assert loss == pytest.approx(whole_loss, rel=1e-9, abs=1e-12)
    assert torch.allclose(gradient, whole_gradient, atol=1e-12)
    for key, value in whole_sums.items():
        assert torch.allclose(sums[key].double(), value.double()), key


def test_tokens_of_different_order_agree_with_the_textbook_too():
    sequences = random_sequences(60)
    agrees(sequences, EVERYTHING["sequence_mask"], interleaved(sequences, 60))


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "importance"])
@pytest.mark.parametrize("wild", [1e6, -1e6, math.inf, -math.inf, math.nan])
def test_a_masked_token_changes_nothing_whatever_it_says(loss, wild):
    algorithm = AlgorithmConfig(**LOSSES[loss], max_token_age=2)
    sequences = random_sequences(70)
    sequences[2] = [*sequences[2], replace(sequences[2][0], age=3)]
    plain, gradient, _ = run_objective(sequences, algorithm)
    sequences[2][-1] = replace(sequences[2][-1], behaviour=wild, advantage=-7.0)
    loud, loud_gradient, _ = run_objective(sequences, algorithm)
    assert loud == plain
    assert loud_gradient.tolist() == gradient.tolist()
    assert loud_gradient[sum(map(len, sequences[:3])) - 1].item() == 0.0


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "importance"])
@pytest.mark.parametrize("far", [2000.0, -2000.0])
def test_a_wild_ratio_gives_finite_loss_and_gradient(loss, far):
    sequences = random_sequences(80)
    sequences[0][0] = replace(sequences[0][0], behaviour=far, proximal=-far, reference=far)
    algorithm = AlgorithmConfig(**LOSSES[loss], proximal="recomputed", kl_coef=0.1)
    value, gradient, sums = run_objective(sequences, algorithm)
    assert math.isfinite(value)
    assert torch.isfinite(gradient).all()
    assert all(torch.isfinite(s).all() for s in sums.values())


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "importance"])
def test_decoupled_with_the_behaviour_as_proximal_policy_is_the_plain_loss(loss, correction):
    sequences = [[replace(t, proximal=t.behaviour) for t in s] for s in random_sequences(90)]
    decoupled = AlgorithmConfig(**LOSSES[loss], proximal="recomputed", **CORRECTIONS[correction])
    a, b = run_objective(sequences, decoupled), run_objective(sequences, AlgorithmConfig(**LOSSES[loss]))
    assert a[0] == pytest.approx(b[0], rel=1e-12)
    assert torch.allclose(a[1], b[1], atol=1e-14)


def test_importance_weighting_does_not_depend_on_the_proximal_policy():
    sequences = random_sequences(91)
    plain = run_objective(sequences, AlgorithmConfig(loss="importance"))
    for proximal in ("recomputed", "interpolated"):
        other = run_objective(sequences, AlgorithmConfig(loss="importance", proximal=proximal))
        assert other[0] == pytest.approx(plain[0], rel=1e-12)
        assert torch.allclose(other[1], plain[1], atol=1e-14)


@pytest.mark.parametrize("name", RECIPES)
def test_on_policy_every_recipe_has_the_plain_policy_gradient(name):
    # π = μ = proximal, age 0: the gradient of the sum is -A for each token (aggregations apart), whatever the recipe
    raw = {"algorithm": {"name": name}, "reference": {"path": "teacher"}} if name == "distillation" else None
    config = parse_config(raw or {"algorithm": {"name": name}})
    algorithm = config.algorithm.model_copy(update={"aggregation": "token"})
    sequences = [
        [replace(t, behaviour=t.logprob, proximal=t.logprob, age=0) for t in s]
        for s in random_sequences(92, one_advantage=True)
    ]
    _, gradient, sums = run_objective(sequences, algorithm)
    tokens = [t for s in sequences for t in s]
    assert gradient.tolist() == pytest.approx([-t.advantage / len(tokens) for t in tokens], rel=1e-9)
    assert sums["clipped"].item() == sums["masked"].item() == 0


def test_kl_coefficient_is_the_one_that_is_passed_in_and_none_goes_into_the_loss_from_the_reward():
    sequences = random_sequences(93)
    algorithm = AlgorithmConfig(kl_coef=0.1)
    loss, _, sums = run_objective(sequences, algorithm, kl_coef=0.4)
    without = run_objective(sequences, AlgorithmConfig())[0]
    mean = sums["kl_ref"].item() / counts_of(sequences).num_tokens
    assert loss - without == pytest.approx(0.4 * mean)
    in_reward = run_objective(sequences, AlgorithmConfig(kl_coef=0.1, kl_in="reward"))
    assert in_reward[0] == pytest.approx(without)
    assert in_reward[2]["kl_ref"].item() == pytest.approx(sums["kl_ref"].item())


def test_entropy_stays_out_of_the_loss_without_a_bonus():
    batch, outputs = micro_batch(random_sequences(94))
    loss, sums = objective(batch, outputs, AlgorithmConfig(), Counts(num_tokens=9, num_sequences=3, longest=9), 0.0, 6)
    loss.backward()
    assert outputs.entropy_M.grad is None
    assert sums["entropy"].item() == pytest.approx(outputs.entropy_M.sum().item())


def test_clipped_counts_only_tokens_that_are_not_masked_and_masked_counts_zero_weights():
    algorithm = AlgorithmConfig(proximal="recomputed", **CORRECTIONS["mask"])
    sequences = random_sequences(95)
    _, gradient, sums = run_objective(sequences, algorithm)
    weights = [w for s in sequences for w in naive_weights(s, algorithm)]
    still = sum(g == 0 for g in gradient.tolist())
    assert sums["masked"].item() == sum(w == 0 for w in weights) > 0
    assert sums["clipped"].item() == still - sums["masked"].item() > 0
    gspo = AlgorithmConfig(**{**LOSSES["gspo"], "clip_low": 1e-6, "clip_high": 1e-6}, max_token_age=2)
    _, gradient, gspo_sums = run_objective(sequences, gspo)
    old = sum(t.age > 2 for s in sequences for t in s)
    assert gspo_sums["clipped"].item() == sum(g == 0 for g in gradient.tolist()) - old > 0
    assert sums["weight"].item() == pytest.approx(sum(weights))
    assert sums["weight_squared"].item() == pytest.approx(sum(w * w for w in weights))


@pytest.mark.parametrize("config", [AlgorithmConfig(), EVERYTHING["ppo"]])
def test_every_sum_has_a_place_of_its_size_and_carries_no_gradient(config):
    _, _, sums = run_objective(random_sequences(96), config)
    sizes = sum_sizes(6)
    assert set(sums) <= set(sizes)
    assert {name: sums[name].numel() for name in sums} == {name: sizes[name] for name in sums}
    assert not any(s.requires_grad for s in sums.values())
    if config.advantage == "gae":
        assert set(sums) == set(sizes)


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ({"proximal": "recomputed"}, "proximal_logprobs_M is missing, and algorithm.proximal = 'recomputed'"),
        ({"kl_coef": 0.1}, "ref_logprobs_M is missing"),
        ({"advantage": "gae"}, "values_M is missing"),
    ],
)
def test_what_is_missing_is_named(change, lacks):
    batch, outputs = micro_batch(random_sequences(97))
    batch = replace(batch, proximal_logprobs_M=None)
    outputs = replace(outputs, values_M=None, ref_logprobs_M=None)
    algorithm = AlgorithmConfig(**change)
    with pytest.raises(ValueError, match=lacks):
        objective(batch, outputs, algorithm, counts_of([[0]]), algorithm.kl_coef, 6)
