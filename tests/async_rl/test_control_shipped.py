"""What ships for robot control beside the presets: they load, the teacher and the expert fit the environments."""

import pytest
import torch

from actors.control.environments.factory import make_environment
from async_rl.config import load_control
from async_rl.shipped import find_shipped
from learner.control.distillation import load_teacher
from learner.control.expert import load_expert

PRESETS = ("pendulum-recurrent", "cartpole-distill", "halfcheetah-amp")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_loads_and_its_networks_read_groups_that_its_environment_has(name):
    config = load_control(name)
    assert config.name == name
    env = make_environment(config, 2, 0, "test")
    try:
        offered = env.spaces.observations
        for network in ("actor", "critic", "teacher", "discriminator"):
            assert set(config.groups_of(network)) <= set(offered)
    finally:
        env.close()


def test_the_recurrent_policy_lacks_the_speed_that_its_critic_sees():
    config = load_control("pendulum-recurrent")
    env = make_environment(config, 2, 0, "test")
    assert config.is_recurrent
    assert env.spaces.size_of(config.groups_of("actor")) == 2
    assert env.spaces.size_of(config.groups_of("critic")) == 3


def test_the_shipped_teacher_keeps_the_pole_up_for_whole_episodes():
    config = load_control("cartpole-distill")
    env = make_environment(config, 16, 3, "test")
    teacher = load_teacher(config, env.spaces)
    obs, length = env.reset(3), torch.zeros(16)
    with torch.inference_mode():
        for _ in range(499):  # none may fall, and the limit is 500
            features, _ = teacher.step(teacher.observe({"teacher": obs["teacher"]}), ())
            step = env.step(teacher.distribution(features).mode())
            length += ~(step.terminated | step.truncated)
            obs = step.observations
    assert length.tolist() == [499] * 16


def test_the_shipped_expert_runs_as_far_as_a_good_gait_does():
    config = load_control("halfcheetah-amp")
    expert = load_expert(config.amp.expert, 17, torch.device("cpu"))
    assert len(expert) == 4000
    speed = expert.states[:, 8]  # of the body, along the ground, m/s: what HalfCheetah is rewarded for
    assert 4 < float(speed.mean()) < 10
    # pairs within one episode: what follows is the state of four rows on, as four cheetahs were recorded side by side
    torch.testing.assert_close(expert.next_states[:-4], expert.states[4:])


def test_a_bare_name_means_the_shipped_file_unless_the_user_has_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = find_shipped("cartpole-teacher")
    assert shipped is not None
    assert shipped.is_dir()
    assert find_shipped("elsewhere/cartpole-teacher") is None
    assert find_shipped("no-such-teacher") is None
    (tmp_path / "cartpole-teacher").mkdir()
    found = find_shipped("cartpole-teacher")
    assert found is not None
    assert found.resolve() == (tmp_path / "cartpole-teacher").resolve()
