"""Objects with rsl_rl's VecEnv interface behind ours, as Isaac Lab's wrapper and older ones look, and user classes."""

import sys
import types

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from actors.control.environments.factory import make_environment
from actors.control.environments.gymnasium_env import GymnasiumEnvironment
from actors.control.environments.rsl_env import RslEnvironment
from async_rl.config.load import parse_control
from async_rl.errors import ConfigError


class Vec:
    """Three environments that say what they are told to say."""

    num_envs, num_actions, max_episode_length, device, cfg = 3, 2, torch.tensor([7, 9, 8]), "cpu", object()

    def __init__(self, observations, rewards=(1.0, 2.0, 3.0), dones=(0, 1, 1), extras=None):
        self.observations = observations
        self.answer = observations, torch.tensor(rewards), torch.tensor(dones), extras or {}

    def get_observations(self):
        return self.observations

    def step(self, actions):
        self.actions = actions
        return self.answer


def ones(*shape, **kwargs):
    return torch.ones(3, *shape, **kwargs)


def test_time_outs_are_truncations_and_the_other_dones_are_terminations():
    env = RslEnvironment(
        Vec({"policy": ones(4)}, extras={"time_outs": torch.tensor([1, 1, 0]), "log": {"/x": 1}}), "actor0"
    )
    step = env.step(torch.full((3, 2), 0.5))
    # the first times out without being done: rsl_rl's wrappers do not, and an episode that goes on is not cut
    assert step.truncated.tolist() == [False, True, False]
    assert step.terminated.tolist() == [False, False, True]
    assert step.rewards.tolist() == [1, 2, 3]
    assert step.final_observations is None
    assert step.resets_next is None
    assert env._env.actions.tolist() == [[0.5, 0.5]] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dones": (1,)}, r"gives dones \[1\] in a step; expected \[3\]"),
        ({"extras": {"time_outs": torch.ones(1)}}, r"gives time_outs \[1\] in a step; expected \[3\]"),
        ({"extras": {"time_outs": torch.ones(3, 1)}}, r"gives time_outs \[3, 1\]"),
    ],
)
def test_flags_that_would_spread_over_all_environments_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        RslEnvironment(Vec({"policy": ones(4)}, **changes), "actor0").step(ones(2))


def test_observations_that_change_their_kind_are_refused_and_not_cut_off():
    vec = Vec({"pixels": ones(4, dtype=torch.uint8)})
    env = RslEnvironment(vec, "actor0")
    vec.answer = ({"pixels": ones(4) * 300.5}, *vec.answer[1:])
    with pytest.raises(ConfigError, match=r"'pixels' of Vec was torch.uint8 at first and is torch.float32 now"):
        env.step(ones(2))
    vec.answer = ({}, *vec.answer[1:])
    with pytest.raises(ConfigError, match=r"gives no observation group 'pixels' any more"):
        env.step(ones(2))


def test_without_time_outs_every_end_is_a_termination():
    step = RslEnvironment(Vec({"policy": ones(4)}), "actor0").step(ones(2))
    assert step.terminated.tolist() == [False, True, True]
    assert not step.truncated.any()


def test_groups_actions_and_limit_become_spaces():
    groups = {"policy": ones(4), "critic": ones(6, dtype=torch.float64), "camera": ones(2, 2, 3, dtype=torch.uint8)}
    env = RslEnvironment(Vec(groups | {"words": ones(5, dtype=torch.int64)}), "actor0")
    found = {name: (group.shape, group.dtype) for name, group in env.spaces.observations.items()}
    assert found == {
        "policy": ((4,), "float32"),
        "critic": ((6,), "float32"),
        "camera": ((2, 2, 3), "uint8"),
        "words": ((5,), "int32"),
    }
    assert env.spaces.action.kind == "continuous"
    assert env.spaces.action.high == (float("inf"),) * 2
    assert env.spaces.max_episode_steps == 9
    step = env.step(ones(2))
    assert {name: str(v.dtype)[6:] for name, v in step.observations.items()} == {n: d for n, (_, d) in found.items()}


def test_a_tensordict_is_read_like_a_dictionary():
    tensordict = pytest.importorskip("tensordict")
    env = RslEnvironment(Vec(tensordict.TensorDict({"policy": ones(4), "critic": ones(6)}, [3])), "actor0")
    assert {name: v.shape for name, v in env.step(ones(2)).observations.items()} == {"policy": (3, 4), "critic": (3, 6)}


def test_older_interfaces_give_a_tensor_and_the_other_groups_in_extras():
    extras = {"observations": {"policy": ones(4), "critic": ones(6)}}
    old = Vec(ones(4), extras=extras)
    old.get_observations = lambda: (ones(4), extras)
    env = RslEnvironment(old, "actor0")
    assert list(env.spaces.observations) == list(env.step(ones(2)).observations) == ["policy", "critic"]


def test_a_plain_tensor_is_the_group_policy():
    assert list(RslEnvironment(Vec(ones(4)), "actor0").spaces.observations) == ["policy"]


def test_discrete_actions_are_declared_by_their_choices():
    discrete = Vec(ones(4))
    discrete.action_choices = (3, 2)
    action = RslEnvironment(discrete, "actor0").spaces.action
    assert (action.kind, action.size, action.choices) == ("discrete", 2, (3, 2))


def test_isaac_lab_is_seeded_and_reset_by_its_two_methods():
    called = []
    isaac = Vec({"policy": ones(4)})
    isaac.seed = lambda seed: called.append(seed)
    isaac.reset = lambda: called.append("reset")
    for name in ("actor0", "actor1"):
        RslEnvironment(isaac, name).reset(4)
    assert called[1] == called[3] == "reset"
    assert called[0] != called[2]
    assert max(called[0], called[2]) < 1 << 31


def test_what_cannot_be_reset_goes_on_where_it_is():
    assert RslEnvironment(Vec({"policy": ones(4)}), "actor0").reset(4)["policy"].shape == (3, 4)


def test_starting_alike_needs_a_method_and_equal_observations():
    vec = Vec({"policy": torch.arange(3.0)[:, None]})
    env = RslEnvironment(vec, "actor0")
    with pytest.raises(ConfigError, match=r"Vec cannot start.*reset_alike\(seed\)"):
        env.reset_alike(0)
    vec.reset_alike = lambda seed: None
    with pytest.raises(ConfigError, match=r"Vec does not start alike.*'policy' differ"):
        env.reset_alike(0)


@pytest.mark.parametrize("given", [{"policy": torch.ones(2, 4)}, {"policy": {"nested": 1}}, {"policy": torch.ones(3)}])
def test_observations_that_are_no_rows_are_refused_by_group(given):
    with pytest.raises(ConfigError, match=r"group 'policy' of Vec is .*\[3, ...\]"):
        RslEnvironment(Vec(given), "actor0")


class Steps(VectorEnv):
    """A user's gymnasium vector environment."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    single_observation_space = spaces.Box(-1, 1, (2,), np.float32)
    single_action_space = spaces.Discrete(2)

    def __init__(self, num_envs, seed, size=1):
        self.num_envs, self.seed, self.size = num_envs, seed, size


def config_of(env_id, **kwargs):
    return parse_control({"domain": "control", "env": {"id": env_id, "kwargs": kwargs}})


@pytest.fixture
def module(monkeypatch):
    """Module ``my_worlds`` of a user."""
    made = types.ModuleType("my_worlds")
    monkeypatch.setitem(sys.modules, "my_worlds", made)
    return made


def test_a_users_vector_environment_is_made_with_its_arguments_and_keeps_its_own_autoreset(module):
    module.Steps = Steps
    env = make_environment(config_of("my_worlds:Steps", size=5), 4, 0, "actor0")
    assert isinstance(env, GymnasiumEnvironment)
    assert (env._env.num_envs, env._env.size) == (4, 5)
    assert env._env.seed != make_environment(config_of("my_worlds:Steps"), 4, 0, "actor1")._env.seed


def test_a_class_that_takes_a_device_is_told_it_unless_the_settings_do(module):
    def make(num_envs, seed, device):
        made.append(device)
        return Vec({"policy": ones(4)})

    made, module.make = [], make
    make_environment(config_of("my_worlds:make"), 3, 0, "actor0", torch.device("cpu"))
    make_environment(config_of("my_worlds:make", device="cuda:1"), 3, 0, "actor0")
    assert made == ["cpu", "cuda:1"]


@pytest.mark.parametrize(
    ("env_id", "kwargs", "message"),
    [
        ("my_worlds:make", {"size": 3}, "is called with num_envs, seed, size, and does not take that.*'size'"),
        ("my_worlds:fails", {}, r"ZeroDivisionError"),
        ("my_worlds:nothing", {}, "made a NoneType; expected an object with rsl_rl's VecEnv interface"),
        ("my_worlds:mak", {}, "did you mean 'make'"),
        ("my_world:make", {}, "no module 'my_world'"),
        ("CartPole-v1", {}, "expected gymnasium:ID or module:Class"),
        ("my_worlds:make", {}, "made 3 environments instead of num_envs = 2"),
    ],
)
def test_a_class_that_cannot_be_used_is_one_sentence_about_it(module, env_id, kwargs, message):
    module.make = lambda num_envs, seed: Vec({"policy": ones(4)})
    module.fails = lambda num_envs, seed: 1 / 0
    module.nothing = lambda num_envs, seed: None
    with pytest.raises(ConfigError, match=message):
        make_environment(config_of(env_id, **kwargs), 2, 0, "actor0")
