"""PPO with a critic: a whole step against torch's own parts; values, checkpoints and what is published."""

import uuid
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle import Oracle
from server_part import server_part
from token_domains import counters, domain_of

from async_rl.data import make_group, token_trajectory
from async_rl.errors import ConfigError
from async_rl.models import load_causal_lm
from learner.checkpoint import Checkpoints
from learner.publisher import Publisher
from learner.step import train_step
from learner.token_domain import load_tensors, model_folder

PPO = {"name": "ppo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1", "value_clip": 0.05}


@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("critic", ["head", "model"])
def test_steps_of_ppo_end_where_a_loop_over_single_sequences_does(
    make_model, make_groups, make_mini_batch, make_updater, critic, trees
):
    algorithm = {**PPO, "critic": critic, "entropy_coef": 0.02, "gamma": 0.9, "lam": 0.8, "epochs": 2, "minibatches": 2}
    updater = make_updater(
        reference_model=make_model(seed=7),
        algorithm=algorithm,
        learner={"lr": 1e-3, "critic_lr": 3e-3, "max_grad_norm": 0.5, "micro_batch_tokens": 70},
    )
    updater.networks.trees = updater.networks.trees and trees
    oracle = Oracle(
        make_model(),
        make_model(seed=5).base_model if critic == "model" else None,
        make_model(seed=7),
        lr=1e-3,
        critic_lr=3e-3,
        algorithm=updater._config.algorithm,
    )
    for step in range(2):
        groups = make_groups(3, size=4, seed=step)
        parts = [groups[:1], groups[1:]]
        stats = train_step(updater._config, updater, [make_mini_batch(part) for part in parts], step)
        oracle.step([[t for g in part for t in g.trajectories] for part in parts], epochs=2, beta=0.1)
    assert stats.metrics()["loss/value"] > 0.01
    for ours, theirs in zip(updater.networks.policy.parameters(), oracle.policy.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 5e-5
    assert (updater.networks.critic.head.weight - oracle.head.weight).abs().max() < 5e-5
    assert oracle.head.weight.abs().max() > 5e-3
    if critic == "model":
        for ours, theirs in zip(updater.networks.critic.trunk.parameters(), oracle.trunk.parameters(), strict=True):
            assert (ours - theirs).abs().max() < 5e-5


def test_values_skip_tool_output(make_updater, make_mini_batch):
    # 3 4 | 5 6 | tool 7 | 8 2: the value of 8 is that of the state after the tool's 7, and follows directly that of 6
    mask, versions = [0, 0, 1, 1, 0, 1, 1], [-1, -1, 3, 3, -1, 3, 3]
    trajectory = token_trajectory(
        prompt=[], completion=[3, 4, 5, 6, 7, 8, 2], logprobs=[0] * 7, versions=versions, reward=1
    )
    trajectory.arrays["loss_mask"][:] = mask
    group = make_group(ordinal=0, attempt=0, task_index=0, trajectories=[trajectory])
    updater = make_updater(algorithm={"name": "ppo", "lam": 0.5, "gamma": 0.5})
    updater.flat.data[updater.flat.span("critic")] = torch.linspace(-0.5, 0.5, 32 * 2)
    with torch.no_grad():
        hidden = updater.networks.policy.base_model(input_ids=torch.tensor([[3, 4, 5, 6, 7, 8]]))[0][0]
        v = updater.networks.critic.head(hidden).squeeze(-1)[[1, 2, 4, 5]].tolist()
    (prepared,) = updater.prepare([make_mini_batch([group])], version=3)
    assert prepared.signals.old_values_M.tolist() == pytest.approx(v, abs=1e-6)
    # returns by hand: R = A + V with A_t = delta_t + 0.25 A_{t+1}
    a3 = 1 - v[3]
    a2 = 0.5 * v[3] - v[2] + 0.25 * a3
    a1 = 0.5 * v[2] - v[1] + 0.25 * a2
    a0 = 0.5 * v[1] - v[0] + 0.25 * a1
    expected = [a0 + v[0], a1 + v[1], a2 + v[2], 1.0]
    assert prepared.signals.returns_M.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_value_head_soon_predicts_what_the_prompt_tells(make_updater, make_groups, make_mini_batch):
    groups = [
        replace(group, rewards=np.full(len(group), float(group.arrays["tokens"][0] % 2), np.float32))
        for group in make_groups(12)
    ]
    updater = make_updater(algorithm={"name": "ppo"}, learner={"lr": 1e-3})
    found = [
        train_step(updater._config, updater, [make_mini_batch(groups)], 3).metrics()["value/explained_variance"]
        for _ in range(40)
    ]
    assert found[0] < 0
    assert found[-1] > 0.8


def test_the_policy_alone_is_published_under_its_own_names(make_updater):
    updater = make_updater(algorithm={"name": "ppo", "critic": "model"})
    updater.flat.data.add_(0.01)
    publisher = Publisher(f"test-{uuid.uuid4().hex[:8]}", updater.flat.slots("policy"), 4 << 20)
    try:
        manifest = publisher.publish(updater.flat.data, 0, evaluated=False)
        assert [t.name for t in manifest.tensors] == [name for name, _ in updater.networks.policy.named_parameters()]
        with open(manifest.segment, "rb") as segment:
            content = segment.read(manifest.nbytes)
        published = torch.frombuffer(bytearray(content), dtype=torch.float32)
        assert torch.equal(published, updater.flat.data[: len(published)])
        assert len(published) <= updater.flat.span("critic").start
    finally:
        publisher.close()


@pytest.mark.parametrize("critic", ["head", "model"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_learner_with_critic_and_adaptive_kl_continues_bit_by_bit(
    tmp_path, make_model, make_updater, make_groups, make_mini_batch, critic, dtype
):
    algorithm = {**PPO, "critic": critic, "kl_controller": "adaptive", "kl_target": 0.5, "epochs": 2}

    def build(policy):
        return make_updater(
            policy,
            reference_model=make_model(seed=7),
            algorithm=algorithm,
            model={"dtype": dtype},
            learner={"lr": 1e-3},
        )

    def train(updater, steps):
        for step in steps:
            train_step(updater._config, updater, [make_mini_batch(make_groups(3, seed=step, version=step + 2))], step)

    straight = build(make_model())
    train(straight, range(2))
    state = counters(2, kl_coef=straight.kl_coef)
    folder = Checkpoints(tmp_path, 2).save(state, domain_of(straight), server_part)
    train(straight, range(2, 5))
    assert 0.1 != state.numbers["kl_coef"] != straight.kl_coef

    resumed = build(load_causal_lm(model_folder(folder), "float32", "cpu"))
    load_tensors(folder, resumed)
    domain_of(resumed).set_numbers(state.numbers)
    train(resumed, range(2, 5))
    assert torch.equal(resumed.flat.data, straight.flat.data)
    assert resumed.kl_coef == straight.kl_coef
    assert not any("critic" in name or "head.bias" in name for name in _names(folder / "hf" / "model.safetensors"))


def test_a_checkpoint_without_the_critic_is_refused(tmp_path, make_updater):
    state = counters(2)
    folder = Checkpoints(tmp_path, 2).save(state, domain_of(make_updater()), server_part)
    with pytest.raises(ConfigError, match=r"critic\.safetensors does not fit the critic"):
        load_tensors(folder, make_updater(algorithm={"name": "ppo"}))


def test_a_checkpoint_with_a_critic_does_not_resume_without_one(tmp_path, make_updater):
    state = counters(2)
    folder = Checkpoints(tmp_path, 2).save(state, domain_of(make_updater(algorithm={"name": "ppo"})), server_part)
    with pytest.raises(ConfigError, match=r"of a run with another algorithm\.advantage or algorithm\.critic"):
        load_tensors(folder, make_updater())


def test_the_critic_has_a_learning_rate_of_its_own(make_updater, make_groups, make_mini_batch):
    updaters = [make_updater(algorithm={"name": "ppo"}, learner={"critic_lr": rate}) for rate in (0.0, 3e-3, 6e-3)]
    for updater in updaters:
        train_step(updater._config, updater, [make_mini_batch(make_groups(3))], 0)
    plain, same, double = (updater.networks.critic.head.weight.detach() for updater in updaters)
    assert torch.equal(plain, same)  # 0 means ten times learner.lr, which is 3e-4 by default, for a head
    assert torch.allclose(double, 2 * plain, rtol=1e-3)  # the first step of Adam has the length of its rate
    models = [
        make_updater(algorithm={"name": "ppo", "critic": "model"}, learner={"critic_lr": rate}) for rate in (0.0, 3e-4)
    ]
    for updater in models:  # and learner.lr itself for a model
        train_step(updater._config, updater, [make_mini_batch(make_groups(3))], 0)
    assert torch.equal(models[0].flat.data, models[1].flat.data)
    policies = [updater.flat.data[updater.flat.span("policy")] for updater in updaters]
    assert torch.equal(policies[0], policies[2])


def test_the_adaptive_coefficient_moves_towards_its_target(make_updater, make_groups, make_mini_batch, make_model):
    algorithm = {"kl_coef": 0.2, "kl_controller": "adaptive"}
    for target, factor in ((1e-4, 1.02), (1e3, 0.98)):  # 1 + 0.1 * clip(kl / target - 1, -0.2, 0.2)
        updater = make_updater(reference_model=make_model(seed=7), algorithm={**algorithm, "kl_target": target})
        stats = train_step(updater._config, updater, [make_mini_batch(make_groups(3))], 0)
        assert stats.metrics()["kl_coef"] == 0.2
        assert stats.metrics()["kl/reference"] > 0.01
        assert updater.kl_coef == pytest.approx(0.2 * factor)


def _names(file):
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())
