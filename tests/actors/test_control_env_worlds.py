"""Our worlds: gymnasium's dynamics, ends and limits, views, mirror images, pictures."""

import math

import gymnasium
import numpy as np
import pytest
import torch

from actors.control.environments.rsl_env import RslEnvironment
from actors.control.worlds import mirror
from actors.control.worlds.cartpole import BatchedCartPole
from actors.control.worlds.pendulum import BatchedPendulum
from actors.control.worlds.variants import PrivilegedCartPole, SparseReach, SparseSwingUp

WORLDS = (BatchedCartPole, PrivilegedCartPole, SparseSwingUp, BatchedPendulum)


def test_a_cartpole_moves_and_falls_as_gymnasiums():
    """Same actions from the same states until each pole has fallen; float32 against float64."""
    num, rng = 16, np.random.default_rng(0)
    ours = BatchedCartPole(num, seed=3)
    theirs = [gymnasium.make("CartPole-v1").unwrapped for _ in range(num)]
    for env, row in zip(theirs, ours.get_observations()["policy"].double().numpy(), strict=True):
        env.reset()
        env.state = row
    alive = [True] * num
    for _ in range(200):
        actions = rng.standard_normal((num, 1))
        seen, rewards, dones, extras = ours.step(torch.from_numpy(actions).float())
        assert rewards.tolist() == [1.0] * num
        assert not extras["time_outs"].any()
        for i in [i for i in range(num) if alive[i]]:
            expected, _, fallen, _, _ = theirs[i].step(int(actions[i, 0] > 0))
            assert bool(dones[i]) == fallen
            alive[i] = not fallen
            if not fallen:
                np.testing.assert_allclose(seen["policy"][i].numpy(), expected, atol=2e-5)
    assert not any(alive)


def test_a_pendulum_swings_and_pays_as_gymnasiums():
    num, rng = 8, np.random.default_rng(0)
    ours = BatchedPendulum(num, seed=3)
    theirs = [gymnasium.make("Pendulum-v1").unwrapped for _ in range(num)]
    for i, env in enumerate(theirs):
        env.reset()
        env.state = ours._state[:, i].double().numpy()
    for _ in range(60):
        actions = rng.standard_normal((num, 1)).astype(np.float32) * 2
        seen, rewards, _, _ = ours.step(torch.from_numpy(actions))
        for i in range(num):
            expected, reward, _, _, _ = theirs[i].step(actions[i])
            np.testing.assert_allclose(seen["policy"][i].numpy(), expected, atol=1e-3)
            assert float(rewards[i]) == pytest.approx(reward, abs=2e-3)


@pytest.mark.parametrize("world", WORLDS)
def test_an_episode_is_cut_off_at_its_limit_and_starts_anew_at_once(world):
    env = world(3, seed=1, max_steps=3)
    env.episode_length_buf[1] = 1
    ends = [env.step(torch.zeros(3, 1)) for _ in range(3)]
    assert [dones.tolist() for _, _, dones, _ in ends] == [[0, 0, 0], [0, 1, 0], [1, 0, 1]]
    for _, _, dones, extras in ends:
        assert torch.equal(extras["time_outs"], dones)
    assert env.episode_length_buf.tolist() == [0, 1, 0]


def test_a_fallen_pole_is_no_time_out_even_in_the_last_step():
    env = BatchedCartPole(2, max_steps=1)
    env._state[1, 0, 0] = 1.0  # angle of the first
    _, _, dones, extras = env.step(torch.zeros(2, 1))
    assert dones.tolist() == [True, True]
    assert extras["time_outs"].tolist() == [False, True]
    assert env.get_observations()["policy"].abs().max() <= 0.05


@pytest.mark.parametrize("world", WORLDS)
def test_seeds_decide_the_starts_and_all_can_start_alike(world):
    env = RslEnvironment(world(4, seed=0), "actor0")
    first = env.reset(1)["policy"]
    assert len(torch.unique(first, dim=0)) == 4
    assert not torch.equal(first, env.reset(2)["policy"])
    assert torch.equal(first, env.reset(1)["policy"])
    alike = env.reset_alike(1)["policy"]
    assert torch.equal(alike, RslEnvironment(world(4, seed=9), "actor1").reset_alike(1)["policy"])
    step = env.step(torch.full((4, 1), 0.5))
    assert len(torch.unique(step.observations["policy"], dim=0)) == 1


def test_a_swing_up_hangs_and_pays_only_upright_near_the_centre():
    env = SparseSwingUp(4, seed=0)
    hanging = env.get_observations()["policy"]
    assert (hanging[:, 2] < -0.99).all()
    # x and θ of four: upright in the centre, upright at the side, leaning 36 degrees, hanging
    env._state[:, 0] = torch.tensor([[0.0, 2.0, 0.0, 0.0], [0.1, 0.1, math.tau / 10, math.pi]])
    env._state[:, 1] = 0.0
    _, rewards, dones, _ = env.step(torch.zeros(4, 1))
    assert rewards.tolist() == [1, 0, 0, 0]
    assert not dones.any()


def test_noise_alone_never_swings_up():
    """500 episodes of a standard normal policy."""
    env, generator = SparseSwingUp(500, seed=0), torch.Generator().manual_seed(0)
    found = torch.zeros(500)
    for _ in range(env.max_episode_length):
        found += env.step(torch.randn(500, 1, generator=generator))[1]
    assert found.sum() == 0


def test_a_swing_up_is_possible():
    """Pumps energy while the pole is low, then balances by hand-made gains."""
    env, total = SparseSwingUp(64, seed=0), torch.zeros(64)
    for _ in range(env.max_episode_length):
        x, speed, cos, sin, spin = env.get_observations()["policy"].unbind(1)
        pump = -torch.sign(spin * cos) - 0.5 * x
        hold = (25 * torch.atan2(sin, cos) + 6 * spin + 1.0 * x + 2 * speed) / 3
        total += env.step(torch.where(cos > 0.9, hold, pump)[:, None])[1]
    assert (total > 0).float().mean() > 0.9


def test_a_wall_stops_the_cart():
    env = SparseSwingUp(1, seed=0)
    for _ in range(300):
        seen = env.step(torch.ones(1, 1))[0]["policy"]
    assert seen[0, 0] == pytest.approx(2.4)
    assert seen[0, 1] == 0


def test_the_student_of_a_cartpole_sees_positions_and_those_before():
    env = PrivilegedCartPole(3, seed=0)
    before = env.get_observations()
    assert torch.equal(before["policy"], before["teacher"][:, [0, 2, 0, 2]])  # nothing was before
    after, _, _, _ = env.step(torch.ones(3, 1))
    assert torch.equal(after["policy"], torch.cat((after["teacher"][:, [0, 2]], before["teacher"][:, [0, 2]]), 1))
    env._state[1, 0, 0] = 1.0
    fallen, _, dones, _ = env.step(torch.ones(3, 1))
    assert dones.tolist() == [True, False, False]
    assert torch.equal(fallen["policy"][0], fallen["teacher"][0, [0, 2, 0, 2]])
    assert not torch.equal(fallen["policy"][1], fallen["teacher"][1, [0, 2, 0, 2]])


def test_the_view_of_a_student_can_be_narrow_and_noisy():
    env = PrivilegedCartPole(2000, seed=0, previous=False, noise=0.1)
    seen = env.get_observations()
    error = seen["policy"] - seen["teacher"][:, [0, 2]]
    assert error.std() == pytest.approx(0.1, rel=0.05)


def test_a_pendulum_can_hide_its_velocity():
    seen = BatchedPendulum(3, hide_velocity=True).get_observations()
    assert seen["policy"].shape == (3, 2)
    assert seen["full"].shape == (3, 3)
    assert torch.equal(seen["policy"], seen["full"][:, :2])


@pytest.mark.parametrize(
    ("world", "image"),
    [
        (BatchedCartPole, mirror.cartpole),
        (PrivilegedCartPole, mirror.cartpole),
        (SparseSwingUp, mirror.swing_up),
        (BatchedPendulum, mirror.pendulum),
    ],
)
def test_mirrored_states_under_mirrored_actions_stay_mirror_images(world, image):
    env, twin = world(5, seed=0), world(5, seed=1)
    twin._state.copy_(-env._state)
    if world is PrivilegedCartPole:
        twin._previous.copy_(-env._previous)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        actions = torch.randn(5, 1, generator=generator)
        _, both = image(None, actions)
        assert torch.equal(both[:5], actions)
        seen, reward, _, _ = env.step(actions)
        mirrored, twin_reward, _, _ = twin.step(both[5:])
        groups, nothing = image(seen, None)
        assert nothing is None
        for name, values in groups.items():
            assert torch.equal(values[:5], seen[name])
            torch.testing.assert_close(values[5:], mirrored[name], atol=1e-6, rtol=0)
        torch.testing.assert_close(reward, twin_reward, atol=1e-5, rtol=0)


def test_the_mirror_image_of_one_of_two_choices_is_the_other():
    assert mirror.cartpole(None, torch.tensor([[0], [1]], dtype=torch.int32))[1].tolist() == [[0], [1], [1], [0]]


@pytest.mark.parametrize("world", WORLDS)
def test_a_picture_shows_the_state(world):
    env = RslEnvironment(world(2, seed=0), "play")
    first = env.render()
    assert first.dtype == np.uint8
    assert first.ndim == 3
    for _ in range(8):
        env.step(torch.ones(2, 1))
    assert (env.render() != first).any()


def test_the_far_place_pays_only_while_the_pole_stands_there():
    world = SparseReach(num_envs=5, seed=0)
    world._state.zero_()
    world._state[0, 0] = torch.tensor([0.0, 2.09, 2.2, 2.3, 2.2])
    world._state[1, 0] = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.3])  # the last has fallen
    _, rewards, dones, _ = world.step(torch.zeros(5, 1))
    assert rewards.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0]
    assert dones.tolist() == [False, False, False, False, True]
