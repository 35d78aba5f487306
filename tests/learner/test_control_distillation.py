"""Distillation: losses by hand, privileged teachers, recurrent students step by step, what is refused."""

import math

import numpy as np
import pytest
import torch
from control_rollouts import lone_group, make_config, make_spaces
from safetensors.torch import save_file

from async_rl.config import to_toml
from async_rl.control.distributions import Categorical, Gaussian
from async_rl.control.networks import build_actor, reset_state
from async_rl.data import Group
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.timer import StateTimer
from learner.control.distillation import Distillation, difference_sum, imitation_sum, load_teacher
from learner.control.domain import ControlDomain

T, N = 6, 4


def save_teacher(folder, spaces, seed=7, **sections):
    """A checkpoint of a policy with random weights; returns the policy."""
    torch.manual_seed(seed)
    config = make_config(**{"policy": {"hidden": [5], "activation": "tanh"}, **sections})
    actor = build_actor(config, spaces)
    with torch.no_grad():
        actor.head.weight.mul_(3)
    (folder / "config.toml").write_text(to_toml(config))
    spaces.write(folder)
    save_file(actor.state_dict(), folder / "policy.safetensors")
    return actor


def student_config(folder, **sections):
    raw = {
        "teacher": {"path": str(folder)},
        "policy": {"hidden": [4], "activation": "tanh"},
        "env": {"num_envs": N, "horizon": T},
        "learner": {"lr_schedule": "constant", "lr": 0.01},
    }
    algorithm = {"name": "distillation", "minibatches": 2, "epochs": 3, **sections.pop("algorithm", {})}
    return make_config(algorithm=algorithm, **{k: raw.get(k, {}) | sections.get(k, {}) for k in raw | sections})


@torch.no_grad()
def fragment(student, spaces, seed=0, version=0, skipped=(), ended=()):
    """What an actor with the student's weights sends, of an environment that is noise."""
    generator = torch.Generator().manual_seed(seed)
    obs = {n: torch.randn(T + 1, N, *space.shape, generator=generator) for n, space in spaces.observations.items()}
    versions, truncated = torch.full((T, N), version, dtype=torch.int32), torch.zeros(T, N, dtype=torch.bool)
    for place in skipped:
        versions[place] = -1
    for place in ended:
        truncated[place] = True
    start = tuple(torch.randn(s.shape, generator=generator) for s in student.initial_state(N, torch.device("cpu")))
    state, actions, logprobs = start, [], []
    for t in range(T):
        if t:
            state = reset_state(state, truncated[t - 1] | (versions[t - 1] < 0))
        features, state = student.step(student.observe({n: o[t] for n, o in obs.items()}), state)
        distribution = student.distribution(features)
        actions.append(distribution.sample(generator))
        logprobs.append(distribution.log_prob(actions[-1]))
    kind = torch.float32 if spaces.action.kind == "continuous" else torch.int32
    arrays = {
        **{f"obs/{n}": o[:-1] for n, o in obs.items()},
        **{f"last_obs/{n}": o[-1:] for n, o in obs.items()},
        "actions": torch.stack(actions).to(kind),
        "logprobs": torch.stack(logprobs),
        "versions": versions,
        "step_rewards": torch.zeros(T, N),
        "terminated": torch.zeros(T, N, dtype=torch.bool),
        "truncated": truncated,
        "episode_returns": torch.tensor([3.0]),
        "episode_lengths": torch.tensor([2], dtype=torch.int32),
        **{f"hidden/actor{i}": array for i, array in enumerate(start)},
    }
    arrays = {name: array.numpy() for name, array in arrays.items()}
    return Group(ordinal=0, attempt=0, task_index=0, lengths=(T,), arrays=arrays, rewards=np.zeros(1, np.float32))


def make_method(config, spaces, seed=0):
    torch.manual_seed(seed)
    return Distillation(config, spaces, lone_group())


def mean_of(actor, x):
    """The mean action of a policy with one hidden layer of tanh, in float64."""
    x = x.astype(np.float64)
    layer = actor.encoder.mlp[0]
    w1, b1, w2, b2 = (p.detach().double().numpy() for p in (*layer.parameters(), *actor.head.parameters()))
    return np.tanh(x @ w1.T + b1) @ w2.T + b2


def test_the_loss_is_the_squared_difference_of_the_means_over_what_acted(tmp_path):
    # the teacher read 'state' and then 'policy' in its environment; here these are called 'privileged' and 'policy'
    save_teacher(tmp_path, make_spaces(policy=3, state=2), observations={"actor": ["state", "policy"]})
    spaces = make_spaces(policy=3, privileged=2)
    method = make_method(student_config(tmp_path, observations={"teacher": ["privileged", "policy"]}), spaces)
    group = fragment(method.modules["policy"], spaces, skipped=[(2, 1), (0, 3)])
    batch = method.prepare([group], 0)
    assert len(batch.updates) == 6
    assert batch.amount == T * N - 2
    obs = {name: group.arrays[f"obs/{name}"] for name in ("policy", "privileged")}
    student = mean_of(method.modules["policy"], obs["policy"])
    teacher = mean_of(method.modules["teacher"], np.concatenate([obs["privileged"], obs["policy"]], -1))
    acted = group.arrays["versions"] >= 0
    seen, total, difference = [], 0.0, 0.0
    for part in batch.updates[:2]:
        loss, sums = method.loss(batch, part)
        index = part.share.index.numpy()
        seen += index.tolist()
        rows = (student - teacher).reshape(-1, 2)[index]
        assert part.count == 11
        assert loss.item() == pytest.approx((rows**2).mean(-1).sum() / 11, rel=1e-5)
        total, difference = total + loss.item(), difference + float(sums["difference"])
    assert sorted(seen) == np.flatnonzero(acted).tolist()
    assert total / 2 == pytest.approx(((student - teacher)[acted] ** 2).mean(), rel=1e-5)
    measured = method.metrics(
        {"imitation": torch.tensor(total), "difference": torch.tensor(difference), "samples": torch.tensor(22.0)}, 2
    )
    assert measured["loss/imitation"] == pytest.approx(((student - teacher)[acted] ** 2).mean(), rel=1e-5)
    assert measured["imitation/difference"] == pytest.approx(np.abs((student - teacher)[acted]).mean(), rel=1e-5)
    assert batch.facts["logp_diff/fresh"] < 1e-6


def test_losses_of_gaussians_by_hand():
    student = Gaussian(torch.tensor([[0.0, 4.0], [1.0, 1.0]]), torch.ones(2))
    teacher = Gaussian(torch.tensor([[0.5, 1.0], [1.0, 1.0]]), torch.full((2,), 9.0))
    assert imitation_sum(student, teacher, "mse").item() == pytest.approx((0.25 + 9) / 2)
    assert imitation_sum(student, teacher, "huber").item() == pytest.approx((0.125 + 2.5) / 2)  # d²/2; |d| - 1/2
    assert difference_sum(student, teacher).item() == pytest.approx((0.5 + 3) / 2)


def test_the_loss_of_choices_is_the_divergence_from_the_teacher():
    teacher = Categorical(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log(), (3,))
    student = Categorical(torch.tensor([[0.125, 0.125, 0.75], [0.1, 0.8, 0.1]]).log(), (3,))
    # 1/2 log 4 + 1/4 log 2 + 1/4 log 1/3; the second sample agrees
    expected = 0.5 * math.log(4) + 0.25 * math.log(2) - 0.25 * math.log(3)
    assert imitation_sum(student, teacher, "mse").item() == pytest.approx(expected, rel=1e-5)
    assert difference_sum(student, teacher).item() == 1


@pytest.mark.parametrize("network", ["gru", "lstm"])
def test_a_recurrent_student_is_trained_on_whole_environments_from_its_stored_states(tmp_path, network):
    spaces = make_spaces()
    save_teacher(tmp_path, spaces)
    config = student_config(tmp_path, policy={"network": network, "rnn_hidden": 3, "hidden": [4]})
    method = make_method(config, spaces)
    student, teacher = method.modules["policy"], method.modules["teacher"]
    group = fragment(student, spaces, ended=[(1, 0), (3, 2)], skipped=[(2, 1), (4, 2)])
    batch = method.prepare([group], 0)
    obs = torch.from_numpy(group.arrays["obs/policy"])
    state = tuple(torch.from_numpy(group.arrays[f"hidden/actor{i}"]) for i in range(1 if network == "gru" else 2))
    ends = torch.from_numpy(group.arrays["truncated"] | (group.arrays["versions"] < 0))
    means = []
    for t in range(T):
        if t:
            state = reset_state(state, ends[t - 1])
        features, state = student.step(obs[t], state)
        means.append(student.distribution(features).mean)
    rows = (torch.stack(means) - teacher.distribution(teacher.features(obs)).mean).flatten(0, 1)
    seen = []
    for part in batch.updates[:2]:
        loss, _ = method.loss(batch, part)
        expected = rows[part.share.index].square().mean(-1).sum() / part.count
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(  # through time, too
            torch.autograd.grad(loss, student.encoder.rnn.weight_hh_l0)[0],
            torch.autograd.grad(expected, student.encoder.rnn.weight_hh_l0, retain_graph=True)[0],
        )
        seen += part.share.index.tolist()
    assert sorted(seen) == np.flatnonzero(group.arrays["versions"] >= 0).tolist()
    assert batch.facts["logp_diff/fresh"] < 1e-6


@pytest.mark.parametrize("discrete", [False, True])
def test_training_brings_the_student_to_the_teacher_which_stays_as_it_was(tmp_path, discrete):
    spaces = make_spaces(discrete=discrete)
    save_teacher(tmp_path, spaces)
    config = student_config(tmp_path, policy={"hidden": [32]}, algorithm={"epochs": 10})
    method = make_method(config, spaces)
    domain = ControlDomain(config, spaces, method, lone_group(), StateTimer())
    teacher = [p.clone() for p in method.modules["teacher"].parameters()]
    spread = method.modules["policy"].std
    losses = []
    for step in range(25):
        group = fragment(method.modules["policy"], spaces, seed=step, version=step)
        losses.append(domain.train_groups([group], step).metrics["loss/imitation"])
    assert sum(losses[-3:]) < 0.2 * sum(losses[:3])
    assert all(torch.equal(a, b) for a, b in zip(method.modules["teacher"].parameters(), teacher, strict=True))
    assert {slot.name for slot in domain.published} == set(method.modules["policy"].state_dict())
    assert domain.flat.slots("teacher")  # compared and checkpointed, but
    trained = domain.flat.trained_span("teacher")
    assert trained.start == trained.stop
    if not discrete:
        assert spread.tolist() == [1.0, 1.0]  # the imitation of means does not move it


def test_the_students_normaliser_takes_the_observations_in_after_the_updates(tmp_path):
    spaces = make_spaces()
    save_teacher(tmp_path, spaces, policy={"hidden": [5], "normalize": True})
    method = make_method(student_config(tmp_path, policy={"hidden": [4], "normalize": True}), spaces)
    group = fragment(method.modules["policy"], spaces, skipped=[(2, 1)])
    batch = method.prepare([group], 0)
    assert method.modules["policy"].normalizer.count == 0
    method.finish(batch, 0)
    acted = group.arrays["obs/policy"][group.arrays["versions"] >= 0].astype(np.float64)
    assert method.modules["policy"].normalizer.count == T * N - 1
    np.testing.assert_allclose(method.modules["policy"].normalizer.mean, acted.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(method.modules["policy"].normalizer.var, acted.var(0), rtol=1e-5, atol=1e-6)
    assert method.modules["teacher"].normalizer.count == 0


def test_other_log_probabilities_for_the_same_weights_end_the_run(tmp_path):
    spaces = make_spaces()
    save_teacher(tmp_path, spaces)
    method = make_method(student_config(tmp_path), spaces)
    group = fragment(method.modules["policy"], spaces)
    group.arrays["logprobs"][:] += 0.1
    with pytest.raises(AsyncRLError, match="disagree"):
        method.prepare([group], 0)


def test_groups_in_another_order_or_not_named_are_not_given_to_a_teacher(tmp_path):
    spaces = make_spaces(policy=3, state=3)
    save_teacher(tmp_path, spaces, observations={"actor": ["state", "policy"]})
    both = {"actor": ["policy"], "teacher": ["policy", "state"]}
    with pytest.raises(ConfigError, match=r"reads the groups \['state', 'policy'\], .* \['policy', 'state'\]"):
        load_teacher(student_config(tmp_path, observations=both), spaces)
    load_teacher(student_config(tmp_path, observations=both | {"teacher": ["state", "policy"]}), spaces)
    save_teacher(tmp_path, spaces, observations={"actor": ["state"]})
    with pytest.raises(ConfigError, match=r"set observations\.teacher"):
        load_teacher(student_config(tmp_path), spaces)  # "policy" has as many numbers
    load_teacher(student_config(tmp_path, observations={"teacher": ["policy"]}), spaces)


def test_a_teacher_that_cannot_be_used_is_refused(tmp_path):
    spaces = make_spaces(policy=3)
    with pytest.raises(ConfigError, match="neither the folder"):
        load_teacher(student_config(tmp_path), spaces)
    save_teacher(tmp_path, make_spaces(policy=4))
    with pytest.raises(ConfigError, match=r"reads 4 numbers.*\['policy'\] has 3"):
        load_teacher(student_config(tmp_path), spaces)
    with pytest.raises(ConfigError, match="no group 'state'"):
        load_teacher(student_config(tmp_path, observations={"teacher": ["state"]}), spaces)
    save_teacher(tmp_path, make_spaces(discrete=True))
    with pytest.raises(ConfigError, match=r"choices out of \[3\].*takes 2 numbers"):
        load_teacher(student_config(tmp_path), spaces)
    with pytest.raises(ConfigError, match="'huber' has no effect"):
        load_teacher(student_config(tmp_path, algorithm={"imitation": "huber"}), make_spaces(discrete=True))
    save_teacher(tmp_path, spaces, policy={"network": "gru", "hidden": [5]})
    with pytest.raises(ConfigError, match="no hidden state of a teacher"):
        load_teacher(student_config(tmp_path), spaces)
