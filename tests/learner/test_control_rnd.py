"""RND against brute force: which state is rewarded, the scale of the reward, the loss, the running statistics."""

import numpy as np
import pytest
import torch
from control_rollouts import CPU, lone_group, make_config, make_rollout, make_spaces

from learner.control.rnd import Rnd, discounted_sums, weight_at
from learner.control.transitions import transitions_of
from learner.flat import FlatParameters


def make_rnd(seed=0, **settings):
    torch.manual_seed(seed)
    config = make_config(rnd={"weight": 0.5, "hidden": [4], "outputs": 2, **settings}, algorithm={"gamma": 0.9})
    return Rnd(config, make_spaces(policy=3), lone_group())


def random_rollout(seed=1, t=5, n=2, **places):
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(t, n, 3, generator=generator)
    return make_rollout({"policy": obs}, {"policy": torch.randn(n, 3, generator=generator)}, **places)


def test_the_state_behind_a_step_is_the_final_one_where_the_fragment_tells_it():
    # one environment that counts; step 1 terminates and row 2 only resets; behind steps 3 and 4 the next episode begins
    obs = torch.arange(6.0).view(6, 1, 1)
    final = {"policy": torch.tensor([[33.0]])}
    rollout = make_rollout(
        {"policy": obs},
        {"policy": torch.tensor([[6.0]])},
        terminated=[(1, 0), (4, 0)],
        truncated=[(3, 0)],
        skipped=[(2, 0)],
        final_obs=final,
    )
    found = transitions_of(rollout, ("policy",))
    assert found.next_states.flatten().tolist() == [1, 2, 3, 33, 5, 6]  # 2 is what row 2 saw: the final observation
    assert found.known.flatten().tolist() == [True, True, False, True, False, True]
    assert found.states.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert rollout.obs["policy"].flatten().tolist() == [0, 1, 2, 3, 4, 5]  # not written to


def test_groups_are_joined_in_the_order_of_the_settings():
    obs = {"a": torch.ones(2, 1, 1), "b": torch.zeros(2, 1, 2)}
    rollout = make_rollout(obs, {"a": torch.full((1, 1), 3.0), "b": torch.full((1, 2), 4.0)})
    found = transitions_of(rollout, ("b", "a"))
    assert found.states[0, 0].tolist() == [0, 0, 1]
    assert found.next_states[1, 0].tolist() == [4, 4, 3]


def test_the_reward_is_the_distance_of_the_embeddings_of_the_next_state_in_deviations_of_the_return():
    rnd, rollout = make_rnd(), random_rollout(skipped=[(2, 1)], terminated=[(1, 1)])
    networks = rnd.modules["rnd"]
    following = torch.cat([rollout.obs["policy"][1:], rollout.last_obs["policy"][None]])
    states = (following - 0) / (1 + 1e-2)  # statistics of nothing: mean 0, variance 1
    distance = (networks.predictor(states) - networks.target(states)).detach().double().numpy()
    distance = np.sqrt((distance**2).sum(-1))
    distance[2, 1] = 0  # a reset step
    sums, before = [], np.zeros(2)
    for t in range(5):
        before = distance[t] + 0.9 * before
        sums.append(before)
    counted = np.array(sums)[rollout.acted.numpy()]
    rewards = torch.arange(10.0).view(5, 2)
    got = rnd.reward(rollout, rewards, step=0)
    torch.testing.assert_close(got.double(), rewards.double() + 0.5 * distance / counted.std(), rtol=1e-5, atol=1e-6)
    assert got[2, 1] == rewards[2, 1]
    measured = rnd.metrics({"rnd_loss": torch.tensor(6.0)}, num_updates=4)
    assert measured["rnd/novelty"] == pytest.approx(distance.sum() / 9, rel=1e-5)
    assert measured["rnd/reward"] == pytest.approx(0.5 * distance.sum() / 9 / counted.std(), rel=1e-5)
    assert measured["loss/rnd"] == 1.5


def test_without_normalisation_the_reward_is_the_weighted_distance_itself():
    rnd, rollout = make_rnd(normalize_states=False, normalize_rewards=False), random_rollout()
    networks = rnd.modules["rnd"]
    following = torch.cat([rollout.obs["policy"][1:], rollout.last_obs["policy"][None]])
    distance = (networks.predictor(following) - networks.target(following)).norm(dim=-1)
    torch.testing.assert_close(rnd.reward(rollout, torch.zeros(5, 2), 0), 0.5 * distance.detach())
    assert not list(networks.buffers())


def test_discounted_sums_go_on_from_the_running_mean():
    got = discounted_sums(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0.5, torch.tensor([8.0]))
    assert got.tolist() == [[5.0, 6.0], [5.5, 7.0]]  # 1 + 4, 2 + 4; 3 + 2.5, 4 + 3


def test_a_constant_reward_has_the_same_running_mean_whatever_the_length_of_a_fragment():
    for t in (2, 40):
        start = torch.zeros(1)
        for _ in range(2000):
            start = discounted_sums(torch.ones(t, 1), 0.9, start).mean(0)
        assert start.item() == pytest.approx(10.0, rel=1e-3)  # 1 / (1 - 0.9)


@pytest.mark.parametrize(
    ("schedule", "expected"), [("constant", [2, 2, 2, 2]), ("linear", [2, 1.5, 1, 1]), ("step", [2, 2, 1, 1])]
)
def test_the_weight_follows_its_schedule(schedule, expected):
    ends = {} if schedule == "constant" else {"final_weight": 1.0, "final_step": 10}
    config = make_config(rnd={"weight": 2.0, "schedule": schedule, **ends})
    assert [weight_at(config.rnd, step) for step in (0, 5, 10, 99)] == expected


def test_the_loss_is_the_mean_squared_difference_over_all_ranks_samples_and_trains_the_predictor_alone():
    rnd, rollout = make_rnd(), random_rollout()
    networks = rnd.modules["rnd"]
    rnd.reward(rollout, torch.zeros(5, 2), 0)
    index = torch.tensor([7, 0, 3])
    loss, sums = rnd.loss(rollout, index, count=6)
    following = torch.cat([rollout.obs["policy"][1:], rollout.last_obs["policy"][None]]).flatten(0, 1)[index] / 1.01
    expected = ((networks.predictor(following) - networks.target(following)) ** 2).sum() / (6 * 2)
    torch.testing.assert_close(loss, expected)
    assert float(sums["rnd_loss"]) == pytest.approx(loss.item())
    assert set(rnd.sums) == set(sums)
    loss.backward()
    assert all(p.grad is not None for p in networks.predictor.parameters())
    assert all(p.grad is None for p in networks.target.parameters())


def test_statistics_of_the_states_change_after_the_updates_only():
    rnd, rollout = make_rnd(), random_rollout(skipped=[(2, 1)])
    states = rnd.modules["rnd"].states
    rnd.reward(rollout, torch.zeros(5, 2), 0)
    assert states.count == 0
    assert rnd.modules["rnd"].returns.count == 9
    rnd.finish(rollout, 0)
    following = torch.cat([rollout.obs["policy"][1:], rollout.last_obs["policy"][None]])[rollout.acted].double()
    assert states.count == 9
    torch.testing.assert_close(states.mean.double(), following.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states.var.double(), following.var(0, correction=0), rtol=1e-5, atol=1e-6)


def test_predictor_target_and_statistics_lie_in_the_flat_vector_and_nothing_else_has_a_gradient():
    rnd, rollout = make_rnd(), random_rollout()
    flat = FlatParameters(rnd.modules, CPU, 0, with_state=True)
    rnd.reward(rollout, torch.zeros(5, 2), 0)
    loss, _ = rnd.loss(rollout, torch.arange(10), 10)
    flat.check_graph(loss)
    loss.backward()
    rnd.finish(rollout, 0)
    flat.check_views()
    trained = flat.trained_span("rnd")
    assert flat.grad[trained].abs().sum() > 0
    assert flat.grad[trained.stop :].abs().sum() == 0
    names = {slot.name for slot in flat.layout}
    assert {"target.0.weight", "states.mean", "states.count", "returns.var"} <= names
    assert all(
        slot.offset >= trained.stop for slot in flat.layout if slot.name.startswith(("target", "states", "returns"))
    )


def test_training_the_predictor_makes_known_states_worth_less_than_unknown_ones():
    rnd, rollout = make_rnd(normalize_rewards=False, hidden=[32], outputs=8), random_rollout(t=40)
    networks = rnd.modules["rnd"]
    before = rnd.reward(rollout, torch.zeros(40, 2), 0).mean()
    optimizer = torch.optim.Adam(networks.predictor.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        rnd.loss(rollout, torch.arange(80), 80)[0].backward()
        optimizer.step()
    after = rnd.reward(rollout, torch.zeros(40, 2), 1).mean()
    far = random_rollout(t=40, seed=9)
    far.obs["policy"].add_(5.0)
    elsewhere = rnd.reward(far, torch.zeros(40, 2), 1).mean()
    assert after < 0.2 * before
    assert elsewhere > 3 * after
