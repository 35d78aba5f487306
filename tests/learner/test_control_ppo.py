"""PPO of fragments: losses by hand, the split, the step's start, the fused MLP, and what a mini-batch sees."""

from __future__ import annotations

import dataclasses
import math
import sys
from types import ModuleType

import pytest
import torch
from control_fragments import SIZE, build_domain, continuous, control_config, discrete, fragment
from torch import nn

from async_rl.control.networks import make_activation
from async_rl.errors import AsyncRLError
from learner.control.fused import BLOCK, FusedMlp
from learner.control.loss_gradients import surrogate_gradient
from learner.control.losses import surrogate_sum, value_sum
from learner.control.rollout import stack_fragments
from learner.control.splits import filled, split_environments, split_samples, step_generator
from learner.control.start import look
from learner.control.step_sums import moments, normalized

CPU = torch.device("cpu")
GRU = {"network": "gru", "rnn_hidden": 8, "rnn_layers": 2}
LSTM = {"network": "lstm", "rnn_hidden": 8, "encoder": "shared"}


def test_surrogate_is_clipped_where_it_would_gain():
    # ratios 1.5, 1.5, 0.5, 0.5, 1.1 with advantages 1, -1, 1, -1, 2
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    total, outside = surrogate_sum(ratios.log(), advantages, 0.2)
    # minima of ratio · A and clipped · A: 1.2, -1.5, 0.5, -0.8, 2.2
    assert total.item() == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8 + 2.2))
    assert outside.item() == 4
    weights = torch.tensor([2.0, 1.0, 0.0, 1.0, 0.5])
    assert surrogate_sum(ratios.log(), advantages, 0.2, weights)[0].item() == pytest.approx(
        -(2 * 1.2 - 1.5 - 0.8 + 0.5 * 2.2)
    )


def test_a_wild_sample_leaves_loss_and_gradient_of_the_others_alone():
    ratios = torch.tensor([1.1, 1.1, 1.1]).log()
    wild = torch.cat((ratios, torch.tensor([200.0, 200.0, -200.0]))).requires_grad_()
    advantages = torch.tensor([2.0, -1.0, 3.0, 1.0, -1.0, 1.0])
    total, _ = surrogate_sum(wild, advantages, 0.2)
    total.backward()
    assert math.isfinite(total.item())
    assert wild.grad.tolist() == pytest.approx([-2.2, 1.1, -3.3, 0.0, 0.0, 0.0])
    by_hand = surrogate_gradient(wild.detach(), advantages, 0.2, None)
    assert by_hand.tolist() == pytest.approx(wild.grad.tolist())


def test_value_loss_is_the_larger_of_the_squares_with_and_without_the_clip():
    values, old, returns = torch.tensor([1.0, 0.5, 3.0]), torch.tensor([0.0, 0.5, 2.0]), torch.tensor([1.0, 0.0, 2.9])
    # 1: (1-1)² = 0, clipped value 0.2: 0.64        2: 0.25 both        3: 0.01, clipped value 2.2: 0.49
    assert value_sum(values, old, returns, 0.2).item() == pytest.approx(0.64 + 0.25 + 0.49)
    assert value_sum(values, old, returns, 0.0).item() == pytest.approx(0.0 + 0.25 + 0.01)


def test_advantages_are_normalised_by_mean_and_unbiased_deviation_of_what_acted():
    advantages = torch.tensor([[1.0, 2.0], [6.0, 99.0]])
    acted = torch.tensor([[True, True], [True, False]])
    totals = moments(advantages, acted)
    assert totals.tolist() == [3.0, 9.0, 41.0]
    std = math.sqrt((4 + 1 + 9) / 2)
    assert torch.allclose(normalized(advantages, totals)[acted], torch.tensor([-2.0, -1.0, 3.0]) / std)
    alike = torch.full((2, 2), 3.0)
    assert not normalized(alike, moments(alike, torch.ones(2, 2, dtype=torch.bool))).any()


@pytest.mark.parametrize("split", [split_samples, split_environments])
def test_mini_batches_hold_every_acted_sample_once_and_change_with_the_step(split):
    acted = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) < 0.8
    shares = split(acted, 3, step_generator(1, 2, 0))
    together = torch.cat([share.index for share in shares])
    assert sorted(together.tolist()) == acted.flatten().nonzero().flatten().tolist()
    again, other = (torch.cat([s.index for s in split(acted, 3, step_generator(1, step, 0))]) for step in (2, 3))
    assert torch.equal(together, again)
    assert not torch.equal(together, other)
    if split is split_environments:
        values = torch.randn(5, 7)
        for share in shares:
            assert torch.equal(values[:, share.envs].flatten()[share.within], values.flatten()[share.index])


@pytest.mark.parametrize("activation", ["elu", "selu", "relu", "tanh"])
@pytest.mark.parametrize("rows", [5, 2 * BLOCK + 3])
def test_the_fused_mlp_gives_outputs_and_gradients_of_autograd(activation, rows):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 24), make_activation(activation), nn.Linear(24, 16), make_activation(activation)]
    plain = nn.Sequential(*layers, nn.Linear(16, 3)).double()
    fused = FusedMlp(list(plain))
    x, weights = torch.randn(rows, 5).double(), torch.randn(rows, 3).double()
    expected = plain(x)
    (expected * weights).sum().backward()
    out, hidden, gradients = torch.empty_like(weights), fused.new_hidden(), fused.new_gradients()
    for start in range(0, rows, BLOCK):
        part = slice(start, start + BLOCK)
        fused.backward(weights[part], fused.forward(x[part], hidden, out[part]), gradients)
    assert torch.allclose(out, expected, atol=1e-12)
    assert torch.allclose(fused(x), expected, atol=1e-12)
    for gradient, linear in zip(gradients, fused.linears, strict=True):
        assert torch.allclose(gradient.weight, linear.weight.grad, rtol=1e-9, atol=1e-9)
        assert torch.allclose(gradient.bias, linear.bias.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spaces", [continuous(), discrete(2), discrete(3, 2)], ids=["continuous", "two", "parts"])
@pytest.mark.parametrize(
    ("policy", "algorithm"),
    [({}, {}), ({"std": "log", "activation": "tanh"}, {"value_clip": 0.0}), ({}, {"entropy_coef": 0.0})],
    ids=["default", "log", "no entropy"],
)
@pytest.mark.parametrize("proximal", ["behaviour", "recomputed"])
def test_the_fused_losses_have_the_gradients_of_autograd(spaces, policy, algorithm, proximal, monkeypatch):
    monkeypatch.setattr("learner.control.fused_ppo.BLOCK", 16)
    config = control_config(
        policy=policy if spaces.action.kind == "continuous" else {k: v for k, v in policy.items() if k != "std"},
        algorithm={"proximal": proximal, "minibatches": 2, **algorithm},
    )
    domain, method = build_domain(config, spaces)
    batch = method.prepare([fragment(config, spaces, method, seed=s, version=0) for s in range(2)], 1)
    with torch.no_grad():  # away from the step's start, so that much is clipped
        for module in method.modules.values():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
    fused, plain = method._evaluator._fused, None
    assert fused is not None
    found = []
    for way in (fused, plain):
        method._evaluator._fused = way
        domain.flat.zero_grad()
        loss, sums = method.loss(batch, batch.updates[0])
        loss.backward()
        found.append((domain.flat.grad.clone(), {name: float(value) for name, value in sums.items()}))
    (ours, our_sums), (theirs, their_sums) = found
    assert our_sums == pytest.approx(their_sums, abs=1e-6)
    assert 0.1 < our_sums["clipped"] < 0.9
    assert theirs.abs().max() > 0.1
    assert (ours - theirs).abs().max() < 1e-6


@pytest.mark.parametrize("spaces", [continuous(), discrete(3, 2)], ids=["continuous", "discrete"])
@pytest.mark.parametrize(
    "policy", [{}, {"normalize": True, "activation": "silu"}, {"encoder": "shared"}, GRU, LSTM], ids=str
)
def test_a_mini_batch_sees_the_policy_of_the_steps_start_until_the_first_update(policy, spaces):
    config = control_config(policy=policy, algorithm={"minibatches": 3})
    _, method = build_domain(config, spaces)
    groups = [fragment(config, spaces, method, seed=seed, next_step=True, ends=0.3) for seed in range(2)]
    batch = method.prepare(groups, 0)
    rollout = batch.data.rollout
    start = look(method.modules["policy"], method.modules["critic"], rollout)
    assert batch.amount == rollout.acted.sum() < rollout.acted.numel()
    assert torch.allclose(start.logprobs[rollout.acted], rollout.logprobs[rollout.acted], atol=1e-5)  # as it acted
    for part in batch.updates[:3]:
        evaluated = method._evaluator(rollout, part)
        index = part.share.index
        assert torch.allclose(evaluated.values, start.values.flatten()[index], atol=1e-5)
        assert evaluated.distribution.kl_from(part.samples.old).abs().max() < 1e-5
        assert torch.allclose(
            evaluated.distribution.log_prob(evaluated.actions), rollout.logprobs.flatten()[index], atol=1e-5
        )
        assert part.count == len(index)


@pytest.mark.parametrize("policy", [{}, GRU, LSTM], ids=str)
def test_truncated_steps_and_the_fragments_end_are_worth_what_the_critic_says_of_the_state_behind_them(policy):
    config, spaces = control_config(policy=policy), continuous()
    _, method = build_domain(config, spaces)
    actor, critic = method.modules["policy"], method.modules["critic"]
    rollout = stack_fragments([fragment(config, spaces, method, seed=s, ends=0.4) for s in range(2)], CPU)
    following = look(actor, critic, rollout).following
    network, kind = (actor, "actor") if critic.shared else (critic, "critic")
    names = sorted(name for name in rollout.states if name.startswith(kind))
    places = torch.stack(rollout.final_index, 1).tolist()
    final = {tuple(place): row for place, row in zip(places, rollout.final_obs["policy"], strict=True)}
    assert len(final) == rollout.truncated.sum() > 5
    for env in range(rollout.num_envs):  # one at a time, step by step
        state = tuple(rollout.states[name][:, env : env + 1] for name in names)
        for step in range(rollout.num_steps):
            if rollout.resets[step, env]:
                state = network.initial_state(1, CPU)
            _, state = network.step(rollout.obs["policy"][step, env : env + 1], state)
            if rollout.terminated[step, env]:
                expected = 0.0
            elif rollout.truncated[step, env]:
                expected = critic.value(network.step(final[step, env][None], state)[0]).item()
            else:
                at_end = step == rollout.num_steps - 1
                obs = rollout.last_obs["policy"][env] if at_end else rollout.obs["policy"][step + 1, env]
                expected = critic.value(network.step(obs[None], state)[0]).item()
            assert following[step, env].item() == pytest.approx(expected, abs=1e-5)


def test_fragments_are_put_side_by_side_and_keep_their_order_of_final_observations():
    config, spaces = control_config(), discrete(4)
    _, method = build_domain(config, spaces)
    groups = [fragment(config, spaces, method, seed=s, num_envs=3 + s, ends=0.5, next_step=True) for s in range(2)]
    rollout = stack_fragments(groups, CPU)
    assert rollout.num_envs == 7
    assert rollout.actions.dtype == torch.int64
    steps, envs = rollout.final_index
    assert rollout.truncated[steps, envs].all()
    assert len(steps) == rollout.truncated.sum()
    # the noise of the tests: with next_step what followed is the next row's observation
    inside = steps < rollout.num_steps - 1
    assert torch.equal(rollout.final_obs["policy"][inside], rollout.obs["policy"][steps[inside] + 1, envs[inside]])
    assert not rollout.resets[0].any()
    ended = rollout.terminated | rollout.truncated | ~rollout.acted
    assert torch.equal(rollout.resets[1:], ended[:-1])
    untold = stack_fragments([fragment(config, spaces, method, seed=1, told=False, ends=0.5)], CPU)
    assert untold.final_obs is None


def test_decoupled_clip_takes_the_ratio_to_the_steps_start_and_weighs_by_how_old_the_sample_is():
    config, spaces = control_config(algorithm={"proximal": "recomputed", "weight_max": 1.5}), continuous()
    _, method = build_domain(config, spaces)
    old = fragment(config, spaces, method, seed=0)
    with torch.no_grad():
        for parameter in method.modules["policy"].parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    batch = method.prepare([old], 3)
    assert batch.facts["logp_diff/fresh"] is None
    assert batch.facts["logp_diff/older"] > 0.01
    assert batch.facts["age/mean"] == 3
    for part in batch.updates[:4]:
        evaluated = method._evaluator(batch.data.rollout, part)
        now = evaluated.distribution.log_prob(evaluated.actions)
        assert torch.allclose(now, part.samples.old_logprobs, atol=1e-6)
        behaviour = batch.data.rollout.logprobs.flatten()[part.share.index]
        assert torch.allclose(part.samples.weights, (now - behaviour).exp().clamp(max=1.5), atol=1e-5)


def test_vtrace_changes_nothing_on_policy_and_something_off_policy():
    spaces = continuous()

    def advantages(correction, version):
        config = control_config(algorithm={"correction": correction})
        _, method = build_domain(config, spaces)
        group = fragment(config, spaces, method)
        with torch.no_grad():
            method.modules["policy"].std.mul_(1.0 if version == 0 else 0.7)
        return torch.cat([part.samples.advantages for part in method.prepare([group], version).updates])

    assert torch.allclose(advantages("vtrace", 0), advantages("none", 0), atol=1e-5)
    assert not torch.allclose(advantages("vtrace", 1), advantages("none", 1), atol=1e-2)


def test_log_probabilities_that_differ_at_the_same_version_end_the_run():
    config, spaces = control_config(), continuous()
    _, method = build_domain(config, spaces)
    group = fragment(config, spaces, method)
    wrong = {**group.arrays, "logprobs": group.arrays["logprobs"] + 0.01}
    group = dataclasses.replace(group, arrays=wrong)
    with pytest.raises(AsyncRLError, match=r"actor and learner disagree .* \(version 0\).* 0\.01 over 48 steps"):
        method.prepare([group], 0)
    method.prepare([group], 1)  # of an older version they may differ


def test_mirror_images_that_are_the_originals_change_nothing(monkeypatch):
    module = ModuleType("twins")

    def twins(obs, actions):
        return obs and {n: torch.cat((o, o)) for n, o in obs.items()}, None if actions is None else actions.repeat(2, 1)

    module.twins = twins
    monkeypatch.setitem(sys.modules, "twins", module)
    spaces = continuous()
    losses = []
    for symmetry in ({}, {"function": "twins:twins", "augment": True}):
        config = control_config(symmetry=symmetry)
        _, method = build_domain(config, spaces)
        batch = method.prepare([fragment(config, spaces, method)], 0)
        loss, sums = method.loss(batch, batch.updates[1])
        losses.append((loss.item(), float(sums["value"]), float(sums["entropy"]), sums["samples"]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_normalisers_take_in_what_acted_after_the_updates():
    config, spaces = control_config(policy={"normalize": True}), continuous()
    domain, method = build_domain(config, spaces)
    groups = [fragment(config, spaces, method, seed=s, next_step=True, ends=0.4) for s in range(2)]
    rollout = stack_fragments(groups, CPU)
    seen = rollout.obs["policy"][rollout.acted]
    domain.train_groups(groups, 0)
    for network in method.modules.values():
        normalizer = network.normalizer
        assert torch.allclose(normalizer.mean, seen.mean(0), atol=1e-5)
        assert torch.allclose(normalizer.var, seen.var(0, correction=0), atol=1e-4)
        assert normalizer.count == len(seen)
        assert normalizer.mean.shape == (SIZE,)


def test_a_mini_batch_without_a_sample_ends_the_run_with_the_knob_to_change():
    assert filled(torch.tensor([3.0, 2.0])) == [3.0, 2.0]
    with pytest.raises(AsyncRLError, match=r"2 samples do not fill 3 mini-batches: lower algorithm\.minibatches"):
        filled(torch.tensor([1.0, 1.0, 0.0]))
