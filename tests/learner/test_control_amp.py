"""AMP against brute force: losses, gradient penalty by finite differences, style reward, replay, expert file."""

import copy
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from control_rollouts import CPU, lone_group, make_config, make_rollout, make_spaces
from safetensors.torch import save_file

from async_rl.config import to_toml
from async_rl.control.networks import build_actor
from async_rl.control.spaces import Action, Observation, Spaces
from async_rl.errors import ConfigError
from learner.control.amp import Amp, draw_seed, style_reward
from learner.control.expert import load_expert
from learner.control.replay import TransitionReplay
from learner.flat import FlatParameters

SCRIPT = Path(__file__).parents[2] / "scripts" / "record_expert.py"


@pytest.fixture
def expert_file(tmp_path):
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(7, 3, generator=generator) + 2
    save_file({"states": states, "next_states": states + 0.5}, tmp_path / "expert.safetensors")
    return str(tmp_path / "expert.safetensors")


def make_amp(expert_file, activation="tanh", seed=0, **settings):
    torch.manual_seed(seed)
    amp = {"style_weight": 0.5, "task_weight": 2.0, "expert": expert_file, "hidden": [4], "replay": 50, **settings}
    config = make_config(amp=amp, policy={"activation": activation})
    return Amp(config, make_spaces(policy=3), lone_group())


def random_rollout(seed=1, t=5, n=2, **places):
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(t, n, 3, generator=generator)
    return make_rollout({"policy": obs}, {"policy": torch.randn(n, 3, generator=generator)}, **places)


def score(amp, inputs):
    """The discriminator by hand, in float64: a hidden layer of tanh and a linear one."""
    w1, b1, w2, b2 = (p.detach().double().numpy() for p in amp.modules["discriminator"].mlp.parameters())
    return (np.tanh(inputs @ w1.T + b1) @ w2.T + b2)[..., 0]


def test_the_style_is_one_for_the_experts_score_and_zero_from_the_policys_on():
    got = style_reward(torch.tensor([1.0, 0.0, 2.0, -1.0, 3.0, -5.0, 9.0]))
    assert got.tolist() == [1.0, 0.75, 0.75, 0.0, 0.0, 0.0, 0.0]


def test_the_reward_is_the_weighted_sum_of_task_and_style_and_ends_have_no_style(expert_file):
    amp = make_amp(expert_file)
    rollout = random_rollout(terminated=[(1, 1), (3, 0)], skipped=[(2, 1)])  # (3, 0) is followed by a new episode
    rewards = torch.arange(10.0).view(5, 2)
    got = amp.reward(rollout, rewards, step=0).double().numpy()
    obs, last = rollout.obs["policy"].double().numpy(), rollout.last_obs["policy"].double().numpy()
    for t in range(5):
        for n in range(2):
            following = obs[t + 1, n] if t < 4 else last[n]
            pair = np.concatenate([obs[t, n], following]) / 1.01  # statistics of nothing: mean 0, variance 1
            style = max(0.0, 1 - 0.25 * (score(amp, pair) - 1) ** 2)
            if (t, n) in ((3, 0), (2, 1)):
                style = 0.0
            assert got[t, n] == pytest.approx(2 * float(rewards[t, n]) + 0.5 * style, rel=1e-5, abs=1e-6)


def test_the_loss_is_least_squares_and_the_penalty_the_slope_by_finite_differences(expert_file):
    amp, rollout = make_amp(expert_file, gradient_penalty=3.0), random_rollout(t=6, n=3)
    amp.reward(rollout, torch.zeros(6, 3), step=4)
    loss, sums = amp.loss(rollout, torch.arange(8), count=20)
    # the same draws again: expert rows first, then rows of the replay, in which the rollout lies from the beginning on
    generator = torch.Generator().manual_seed(draw_seed(0, 4, 0))
    rows = torch.randint(7, (8,), generator=generator)
    places = torch.randint(18, (8,), generator=generator)
    expert = load_expert(expert_file, 3, CPU)
    expert = torch.cat([expert.states[rows], expert.next_states[rows]], 1).double().numpy() / 1.01
    following = torch.cat([rollout.obs["policy"][1:], rollout.last_obs["policy"][None]])
    policy = torch.cat([rollout.obs["policy"], following], 2).flatten(0, 1)[places].double().numpy() / 1.01
    slopes = np.zeros((8, 6))
    for i in range(6):
        nudge = np.zeros(6)
        nudge[i] = 1e-5
        slopes[:, i] = (score(amp, expert + nudge) - score(amp, expert - nudge)) / 2e-5
    fit = ((score(amp, expert) - 1) ** 2).sum() + ((score(amp, policy) + 1) ** 2).sum()
    penalty = 0.5 * 3.0 * (slopes**2).sum()
    assert float(sums["amp_loss"]) == pytest.approx(fit / 20, rel=1e-5)
    assert float(sums["amp_penalty"]) == pytest.approx(penalty / 20, rel=1e-5)
    assert loss.item() == pytest.approx((fit + penalty) / 20, rel=1e-5)
    assert int(sums["amp_expert_right"]) == (score(amp, expert) > 0).sum()
    assert int(sums["amp_policy_right"]) == (score(amp, policy) < 0).sum()
    assert (sums["amp_expert"], sums["amp_policy"]) == (8, 8)
    assert set(sums) == set(amp.sums)


@pytest.mark.parametrize("activation", ["elu", "relu", "selu", "tanh", "gelu", "silu", "leaky_relu"])
@pytest.mark.parametrize("hidden", [[], [5, 4]])
def test_the_slope_is_that_of_finite_differences_for_every_activation(expert_file, activation, hidden):
    amp = make_amp(expert_file, activation, hidden=hidden)
    discriminator = amp.modules["discriminator"].double()
    inputs = torch.randn(6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    score, slope = discriminator.score_and_slope(inputs)
    assert torch.equal(score, discriminator.score(inputs))
    for i in range(6):
        nudge = torch.zeros(6, dtype=torch.float64)
        nudge[i] = 1e-6
        expected = (discriminator.score(inputs + nudge) - discriminator.score(inputs - nudge)) / 2e-6
        torch.testing.assert_close(slope[:, i], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("activation", ["tanh", "elu", "relu", "silu"])
def test_the_gradient_in_the_flat_vector_is_that_of_finite_differences(expert_file, activation):
    amp, rollout = make_amp(expert_file, activation, gradient_penalty=30.0), random_rollout(t=6, n=3)
    amp.modules["discriminator"].double()  # the flat vector is float32; the reference is not

    def loss_at(parameters=None):
        reference = copy.copy(amp)
        reference._generator = torch.Generator().manual_seed(9)
        if parameters is not None:
            torch.nn.utils.vector_to_parameters(parameters, amp.modules["discriminator"].parameters())
        return reference.loss(rollout, torch.arange(8), count=8)[0]

    amp._replay.push(rollout.obs["policy"][0], rollout.obs["policy"][1])
    start = torch.nn.utils.parameters_to_vector(amp.modules["discriminator"].parameters()).detach()
    expected = torch.zeros_like(start)
    for i in range(len(start)):
        nudge = torch.zeros_like(start)
        nudge[i] = 1e-6
        expected[i] = (loss_at(start + nudge).detach() - loss_at(start - nudge).detach()) / 2e-6
    torch.nn.utils.vector_to_parameters(start, amp.modules["discriminator"].parameters())
    amp.modules["discriminator"].float()
    flat = FlatParameters(amp.modules, CPU, 0, with_state=True)
    loss = loss_at()
    flat.check_graph(loss)
    loss.backward()
    flat.check_views()
    trained = [slot for slot in flat.layout if slot.name.startswith("mlp")]
    got = torch.cat([flat.grad[slot.offset : slot.offset + slot.numel] for slot in trained])
    torch.testing.assert_close(got.double(), expected, rtol=2e-3, atol=2e-4)
    assert flat.grad[flat.trained_span("discriminator").stop :].abs().sum() == 0


def test_statistics_take_both_sides_with_equal_weight_after_the_updates(expert_file):
    amp, rollout = make_amp(expert_file), random_rollout(skipped=[(2, 1)])
    normalizer = amp.modules["discriminator"].normalizer
    amp.reward(rollout, torch.zeros(5, 2), step=0)
    assert normalizer.count == 0
    amp.finish(rollout, 0)
    policy = rollout.obs["policy"][rollout.acted].double()  # 9 states
    expert = load_expert(expert_file, 3, CPU).states.double()
    mean = (policy.mean(0) + expert.mean(0)) / 2
    square = ((policy**2).mean(0) + (expert**2).mean(0)) / 2
    assert normalizer.count == 18
    torch.testing.assert_close(normalizer.mean.double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(normalizer.var.double(), square - mean**2, rtol=1e-5, atol=1e-5)
    assert amp.metrics({name: torch.tensor(1.0) for name in amp.sums}, 2)["loss/discriminator"] == 0.5


def test_without_a_known_transition_there_is_no_policy_loss_and_no_style(expert_file):
    amp = make_amp(expert_file)
    rollout = random_rollout(t=1, terminated=[(0, 0), (0, 1)])
    rewards = amp.reward(rollout, torch.ones(1, 2), step=0)
    assert rewards.tolist() == [[2.0, 2.0]]
    loss, sums = amp.loss(rollout, torch.arange(2), count=2)
    amp.finish(rollout, 0)
    assert torch.isfinite(loss)
    assert sums["amp_policy"] == 0
    totals = {name: torch.as_tensor(float(value)) for name, value in sums.items()}
    measured = amp.metrics(totals, 1)
    assert measured["amp/accuracy_policy"] is None
    assert measured["amp/style"] is None
    assert amp.modules["discriminator"].normalizer.count == 0


def test_training_tells_expert_and_policy_apart(expert_file):
    amp, rollout = make_amp(expert_file, gradient_penalty=0.1, hidden=[16]), random_rollout(t=20, n=3)
    optimizer = torch.optim.Adam(amp.modules["discriminator"].parameters(), 1e-2)
    for step in range(100):
        amp.reward(rollout, torch.zeros(20, 3), step)
        loss, sums = amp.loss(rollout, torch.arange(30), 30)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert int(sums["amp_expert_right"]) >= 28
    assert int(sums["amp_policy_right"]) >= 28


def test_what_is_drawn_depends_on_seed_step_and_rank_alone(expert_file):
    def first_loss(step):
        amp = make_amp(expert_file)
        amp.reward(random_rollout(t=20), torch.zeros(20, 2), step)
        return amp.loss(random_rollout(t=20), torch.arange(8), 8)[0].item()

    assert first_loss(3) == first_loss(3)
    assert first_loss(3) != first_loss(4)
    assert len({draw_seed(seed, step, rank) for seed in (0, 1) for step in range(50) for rank in range(4)}) == 400


def test_the_replay_keeps_the_newest_pairs():
    replay = TransitionReplay(4, 1, CPU)
    with pytest.raises(ValueError, match="empty"):
        replay.sample(1, torch.Generator())

    def held():
        states, following = replay.sample(400, torch.Generator().manual_seed(0))
        assert torch.equal(following, states + 0.5)
        return sorted(set(states.flatten().tolist()))

    for pushed, expected in (
        ([1, 2, 3], [1, 2, 3]),
        ([4, 5], [2, 3, 4, 5]),
        ([], [2, 3, 4, 5]),
        ([6, 7, 8, 9, 10, 11], [8, 9, 10, 11]),
    ):
        states = torch.tensor(pushed, dtype=torch.float32).view(-1, 1)
        replay.push(states, states + 0.5)
        assert held() == expected


@pytest.mark.parametrize(("capacity", "kept"), [(4, [2, 3, 4, 5]), (9, [2, 3, 4, 5]), (3, [3, 4, 5])])
def test_a_replay_goes_on_from_a_checkpoint_whatever_its_capacity(capacity, kept):
    first, second = TransitionReplay(4, 2, CPU), TransitionReplay(capacity, 2, CPU)
    for states in (torch.arange(0.0, 8).view(4, 2), torch.arange(8.0, 12).view(2, 2)):  # rows 0 to 5; the ring turns
        first.push(states, states + 0.5)
    second.load_state(first.state())
    states, following = second.sample(200, torch.Generator().manual_seed(0))
    assert sorted(set(states[:, 0].tolist())) == [2.0 * row for row in kept]
    assert torch.equal(following, states + 0.5)
    if capacity == 4:
        assert torch.equal(states, first.sample(200, torch.Generator().manual_seed(0))[0])


@pytest.mark.parametrize("state", [{}, {"pairs": torch.zeros(3, 2, 5)}, {"pairs": torch.zeros(3, 2)}])
def test_a_replay_of_something_else_is_refused(state):
    with pytest.raises((KeyError, ValueError)):
        TransitionReplay(4, 2, CPU).load_state(state)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"states": torch.zeros(4, 3)}, "lacks next_states"),
        ({"states": torch.zeros(4, 2), "next_states": torch.zeros(4, 2)}, r"states is float32 \[4, 2\].*\[M, 3\]"),
        ({"states": torch.zeros(4, 3), "next_states": torch.zeros(5, 3)}, "4 states and 5 next_states"),
        ({"states": torch.zeros(0, 3), "next_states": torch.zeros(0, 3)}, "M > 0"),
        ({"states": torch.zeros(4, 3), "next_states": torch.full((4, 3), torch.nan)}, "next_states has.*not finite"),
        ({"states": torch.zeros(4, 3).double(), "next_states": torch.zeros(4, 3)}, "float64"),
    ],
)
def test_a_file_of_an_expert_that_is_none_is_refused(tmp_path, arrays, said):
    path = tmp_path / "bad.safetensors"
    save_file(arrays, path)
    with pytest.raises(ConfigError, match=said):
        load_expert(str(path), 3, CPU)


def test_a_missing_or_damaged_file_of_an_expert_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_expert(str(tmp_path / "none.safetensors"), 3, CPU)
    (tmp_path / "text.safetensors").write_text("not one")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_expert(str(tmp_path / "text.safetensors"), 3, CPU)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_recorded_transitions_obey_the_physics_of_the_environment_and_can_be_loaded(tmp_path, autoreset, capsys):
    spec = importlib.util.spec_from_file_location("record_expert", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    env = {"id": "gymnasium:CartPole-v1", "autoreset": autoreset, "vectorization": "sync"}
    config = make_config(env=env, policy={"hidden": [8]})
    action = Action(kind="discrete", size=1, choices=(2,))
    spaces = Spaces(observations={"policy": Observation((4,))}, action=action, max_episode_steps=500)
    torch.manual_seed(0)
    (tmp_path / "config.toml").write_text(to_toml(config))
    spaces.write(tmp_path)
    save_file(build_actor(config, spaces).state_dict(), tmp_path / "policy.safetensors")
    out = tmp_path / "recorded.safetensors"
    arguments = [str(tmp_path), str(out), "--transitions", "300", "--num-envs", "3", "--sample"]
    assert script.main(arguments) == 0
    assert "300 transitions of 4 numbers (policy)" in capsys.readouterr().out
    expert = load_expert(str(out), 4, CPU)
    states, following = expert.states, expert.next_states
    assert len(expert) == 300
    # CartPole integrates with steps of 0.02 s: a pair over the border of two episodes would not fit
    torch.testing.assert_close(following[:, 0], states[:, 0] + 0.02 * states[:, 1], rtol=0, atol=1e-6)
    torch.testing.assert_close(following[:, 2], states[:, 2] + 0.02 * states[:, 3], rtol=0, atol=1e-6)
    fallen = (following[:, 2].abs() > 0.2095).sum()
    assert (fallen > 3) == (autoreset == "next_step")  # only there the environment tells how an episode ended
    assert script.main([*arguments, "--group", "nothing"]) == 2
    assert "no group 'nothing'" in capsys.readouterr().err
