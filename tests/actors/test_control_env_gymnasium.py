"""gymnasium vector environments behind our interface: both autoreset modes, spaces, seeds, clear refusals."""

import os
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from actors.control.environments.factory import make_environment
from actors.control.environments.gymnasium_env import GymnasiumEnvironment
from actors.control.environments.gymnasium_spaces import action_of, observation_groups
from async_rl.config.load import parse_control
from async_rl.errors import ConfigError


def config_of(algorithm="ppo", **env):
    return parse_control({"domain": "control", "env": env, "algorithm": {"name": algorithm}})


class Counting(gymnasium.Env):
    """Observes (episode, step); rewards the step's number; ends as told after 3 steps."""

    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def __init__(self, terminates=False, truncates=True):
        self.ends, self.episode, self.taken = (terminates, truncates), 0, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return np.array([self.episode, 0.0]), {}

    def step(self, action):
        self.steps += 1
        self.taken.append(np.array(action))
        over = self.steps == 3
        ends = [over and kind for kind in self.ends]
        return np.array([self.episode, self.steps], np.float64), float(self.steps), *ends, {}


def counting(mode, **ends):
    """Two of them; the second is two steps ahead."""
    env = SyncVectorEnv([lambda: Counting(**ends)] * 2, autoreset_mode=mode)
    adapter = GymnasiumEnvironment(env, "actor0")
    adapter.reset(0)
    env.envs[1].unwrapped.steps = 2
    return adapter, env


NO_ACTION = torch.zeros(2, 2)


def test_next_step_tells_what_the_ending_step_saw_and_that_the_next_only_resets():
    env, _ = counting(AutoresetMode.NEXT_STEP)
    step = env.step(NO_ACTION)
    assert step.observations["policy"].tolist() == [[1, 1], [1, 3]]
    assert step.rewards.tolist() == [1, 3]
    assert step.truncated.tolist() == step.resets_next.tolist() == [False, True]
    assert not step.terminated.any()
    assert step.final_observations["policy"].tolist() == [[1, 3]]

    step = env.step(NO_ACTION)
    assert step.observations["policy"].tolist() == [[1, 2], [2, 0]]
    assert step.rewards.tolist() == [2, 0]
    assert not (step.terminated | step.truncated | step.resets_next).any()
    assert step.final_observations["policy"].shape == (0, 2)

    step = env.step(NO_ACTION)
    assert step.observations["policy"].tolist() == [[1, 3], [2, 1]]
    assert step.resets_next.tolist() == [True, False]


def test_same_step_shows_the_new_episode_and_tells_the_last_observation_of_the_old():
    env, _ = counting(AutoresetMode.SAME_STEP)
    step = env.step(NO_ACTION)
    assert step.observations["policy"].tolist() == [[1, 1], [2, 0]]
    assert step.rewards.tolist() == [1, 3]
    assert step.truncated.tolist() == [False, True]
    assert step.final_observations["policy"].tolist() == [[1, 3]]
    assert step.resets_next is None


class Batched(VectorEnv):
    """Cuts all its environments off in each step and resets them in the same."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    single_observation_space = spaces.Dict({"a": spaces.Box(-9, 9, (1,), np.float32), "b": spaces.Discrete(3)})
    single_action_space = spaces.Discrete(2)
    num_envs = 2

    def __init__(self, info):
        self.info = info

    def step(self, actions):
        seen = {"a": np.zeros((2, 1), np.float32), "b": np.array([0, 1])}
        return seen, np.ones(2), np.array([True, False]), np.ones(2, np.bool_), self.info


@pytest.mark.parametrize(
    "told",
    [
        {"a": np.array([[5.0], [6.0]], np.float32), "b": np.array([1, 2])},
        np.array([{"a": np.float32([5]), "b": 1}, {"a": np.float32([6]), "b": 2}], dtype=object),
    ],
)
def test_last_observations_are_read_from_batched_dictionaries_and_from_one_for_each(told):
    step = GymnasiumEnvironment(Batched({"final_obs": told}), "actor0").step(torch.zeros(2, 1, dtype=torch.int32))
    assert step.truncated.tolist() == [False, True]
    assert step.final_observations["a"].tolist() == [[6]]
    assert step.final_observations["b"].tolist() == [[0, 0, 1]]


def test_resetting_in_the_same_step_without_telling_the_last_observation_is_refused():
    with pytest.raises(ConfigError, match=r"info\['final_obs'\]"):
        GymnasiumEnvironment(Batched({}), "actor0").step(torch.zeros(2, 1, dtype=torch.int32))


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_episode_that_terminates_and_is_cut_off_at_once_has_terminated(mode):
    env, _ = counting(mode, terminates=True, truncates=True)
    step = env.step(NO_ACTION)
    assert step.terminated.tolist() == [False, True]
    assert not step.truncated.any()
    assert step.final_observations["policy"].shape == (0, 2)


def test_numbers_are_float32_and_actions_are_clipped_to_the_bounds():
    env, inner = counting(AutoresetMode.NEXT_STEP)
    given = torch.tensor([[5.0, -0.5], [0.25, -7.0]])
    step = env.step(given)
    assert [e.unwrapped.taken[-1].tolist() for e in inner.envs] == [[1.0, -0.5], [0.25, -1.0]]
    assert given.tolist() == [[5.0, -0.5], [0.25, -7.0]]
    assert step.rewards.dtype == step.observations["policy"].dtype == torch.float32
    assert env.spaces.action.low == (-1.0, -1.0)


def test_both_modes_of_cartpole_play_the_same_episodes():
    """About ten pushes to the right fell the pole; the reset steps of next_step are left out."""
    played = {}
    for mode in ("next_step", "same_step"):
        env = make_environment(config_of(vectorization="sync", autoreset=mode), 3, 0, "actor0")
        rows, seen, idle = [[] for _ in range(3)], env.reset(0)["policy"], torch.zeros(3, dtype=torch.bool)
        for _ in range(120):
            step = env.step(torch.ones(3, 1, dtype=torch.int32))
            for i in range(3):
                if not idle[i]:
                    rows[i].append((*seen[i].tolist(), step.rewards[i].item(), step.terminated[i].item()))
            idle = torch.zeros_like(idle) if step.resets_next is None else step.resets_next
            seen = step.observations["policy"]
        played[mode] = rows
        env.close()
    for one, other in zip(played["next_step"], played["same_step"], strict=True):
        shared = min(len(one), len(other))
        assert sum(row[-1] for row in one[:shared]) >= 2  # episodes ended in between
        assert one[:shared] == other[:shared]


def test_cartpole_has_its_own_vectorised_form_and_a_limit():
    env = make_environment(config_of(), 4, 0, "actor0")
    assert type(env._env).__name__ == "CartPoleVectorEnv"
    assert env.spaces.max_episode_steps == 500
    assert env.spaces.action.choices == (2,)
    before = env.reset(1)["policy"]
    step = env.step(torch.tensor([[0], [1], [0], [1]], dtype=torch.int32))
    pushed = (step.observations["policy"] - before)[:, 1]  # speed: 0.02 s of 10 N on about 1 kg
    assert pushed.sign().tolist() == [-1, 1, -1, 1]


def test_processes_start_otherwise_and_lives_repeat_by_seed():
    env = {name: make_environment(config_of(), 8, 0, name) for name in ("actor0", "actor1")}
    first = env["actor0"].reset(5)["policy"]
    assert not torch.equal(first, env["actor1"].reset(5)["policy"])
    assert torch.equal(first, env["actor0"].reset(5)["policy"])
    assert not torch.equal(first, env["actor0"].reset(6)["policy"])
    assert len(torch.unique(first, dim=0)) == 8


def test_starts_are_alike_for_grpo_under_any_name_and_differ_by_seed():
    env = {name: make_environment(config_of("grpo"), 4, 0, name) for name in ("actor0", "actor1")}
    first = env["actor0"].reset_alike(9)["policy"]
    assert torch.equal(first, first[:1].expand(4, 4))
    assert torch.equal(first, env["actor1"].reset_alike(9)["policy"])
    assert not torch.equal(first, env["actor0"].reset_alike(10)["policy"])


def test_starting_alike_is_refused_where_environments_take_one_seed_for_all():
    with pytest.raises(ConfigError, match=r"cannot start its environments alike.*'sync'"):
        make_environment(config_of(), 4, 0, "actor0").reset_alike(0)


def test_starting_alike_is_refused_where_the_seed_does_not_decide():
    class Stray(Counting):
        def reset(self, *, seed=None, options=None):
            return np.array([id(self) % 1009, 0.0]), {}

    stray = [Stray(), Stray()]
    env = GymnasiumEnvironment(SyncVectorEnv([lambda: stray.pop()] * 2), "actor0")
    with pytest.raises(ConfigError, match="group 'policy' differ"):
        env.reset_alike(0)


@pytest.mark.real
def test_a_process_for_each_environment_gives_what_sync_gives():
    steps = {}
    for how in ("sync", "async"):
        env = make_environment(config_of(id="gymnasium:Pendulum-v1", vectorization=how), 2, 0, "actor0")
        env.reset(3)
        steps[how] = [env.step(torch.tensor([[0.5], [-1.0]])) for _ in range(5)]
        env.close()
    for one, other in zip(steps["sync"], steps["async"], strict=True):
        assert torch.equal(one.observations["policy"], other.observations["policy"])
        assert torch.equal(one.rewards, other.rewards)


DIES = """
import os, signal
from actors.control.environments.factory import make_environment
from async_rl.config.load import parse_control
env = {"id": "gymnasium:CartPole-v1", "vectorization": "async"}
made = make_environment(parse_control({"domain": "control", "env": env}), 2, 0, "actor0")
print(*(child.pid for child in made._env.processes), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.real
def test_processes_of_environments_end_with_an_actor_that_is_killed():
    done = subprocess.run([sys.executable, "-c", DIES], capture_output=True, text=True, timeout=100)
    children = [int(pid) for pid in done.stdout.split()]  # the pipe was closed by the last of them
    assert len(children) == 2
    deadline = time.monotonic() + 20
    while any(_lives(pid) for pid in children) and time.monotonic() < deadline:
        os.sched_yield()
    assert not any(_lives(pid) for pid in children)


def _lives(pid):
    """A zombie that nobody waits for has ended, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("space", "shape", "dtype", "given", "read"),
    [
        (spaces.Box(-1, 1, (2, 3), np.float64), (6,), "float32", np.ones((2, 2, 3)), [[1] * 6] * 2),
        (spaces.Box(0, 255, (1, 2), np.uint8), (1, 2), "uint8", np.full((1, 1, 2), 7, np.uint8), [[[7, 7]]]),
        (spaces.Box(0, 9, (2,), np.int64), (2,), "int32", np.array([[3, 4]]), [[3, 4]]),
        (spaces.Discrete(3, start=5), (3,), "float32", np.array([5, 7]), [[1, 0, 0], [0, 0, 1]]),
        (spaces.MultiDiscrete([2, 3]), (5,), "float32", np.array([[1, 2]]), [[0, 1, 0, 0, 1]]),
        (spaces.MultiBinary(3), (3,), "float32", np.array([[1, 0, 1]], np.int8), [[1, 0, 1]]),
    ],
)
def test_observation_spaces_become_groups(space, shape, dtype, given, read):
    groups, readers = observation_groups(space)
    assert groups["policy"].shape == shape
    assert groups["policy"].dtype == dtype
    tensor = readers["policy"](given)
    assert tensor.tolist() == read
    assert tensor.dtype == getattr(torch, dtype)


def test_a_dictionary_is_a_group_per_key():
    space = spaces.Dict(
        {"image": spaces.Box(0, 255, (4, 4, 3), np.uint8), "state": spaces.Box(-1, 1, (2,), np.float32)}
    )
    groups, readers = observation_groups(space)
    assert {name: group.shape for name, group in groups.items()} == {"image": (4, 4, 3), "state": (2,)}
    assert set(readers) == set(groups)


def test_reading_float32_shares_memory():
    _, readers = observation_groups(spaces.Box(-1, 1, (2,), np.float32))
    given = np.zeros((3, 2), np.float32)
    readers["policy"](given)[0, 0] = 5
    assert given[0, 0] == 5


@pytest.mark.parametrize(
    ("space", "size", "choices", "given", "written"),
    [
        (spaces.Discrete(4, start=-1), 1, (4,), [[0], [3]], [-1, 2]),
        (spaces.MultiDiscrete([2, 3]), 2, (2, 3), [[1, 2]], [[1, 2]]),
        (spaces.MultiDiscrete([2, 3], start=[1, 10]), 2, (2, 3), [[1, 2]], [[2, 12]]),
        (spaces.MultiBinary(2), 2, (2, 2), [[1, 0]], [[1, 0]]),
    ],
)
def test_discrete_actions_are_written_as_their_space_wants_them(space, size, choices, given, written):
    action, write = action_of(space)
    assert (action.kind, action.size, action.choices) == ("discrete", size, choices)
    taken = write(np.array(given, np.int32))
    assert taken.tolist() == written
    assert space.contains(taken[0])


def test_actions_of_any_shape_are_flat_for_the_policy():
    action, write = action_of(spaces.Box(-1, 1, (2, 2), np.float64))
    assert action.size == 4
    taken = write(np.array([[0.5, 3, -3, 0]], np.float32))
    assert taken.tolist() == [[[0.5, 1], [-1, 0]]]
    assert taken.dtype == np.float64


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)})})])
def test_an_observation_that_no_group_can_hold_is_named(space):
    with pytest.raises(ConfigError, match=r"observation group '(policy|a)' is (Text|Dict)\("):
        observation_groups(space)


@pytest.mark.parametrize("space", [spaces.Box(0, 9, (2,), np.int64), spaces.Tuple([spaces.Discrete(2)])])
def test_an_action_that_no_policy_can_take_is_named(space):
    with pytest.raises(ConfigError, match=r"action space is (Box|Tuple)\("):
        action_of(space)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"id": "gymnasium:CartPol-v1"}, "did you mean 'gymnasium:CartPole-v1'"),
        ({"id": "gymnasium:CartPole-v9"}, "did you mean 'gymnasium:CartPole-v1'"),
        ({"id": "gymnasium:no_such_package:Thing-v0"}, "No module named 'no_such_package'; it is looked for in"),
        ({"kwargs": {"wheels": 3}}, "wheels"),
        ({"id": "gymnasium:Pendulum-v1", "kwargs": {"wheels": 3}}, "wheels"),
        ({"autoreset": "same_step"}, "env.autoreset = 'same_step'.*env.vectorization = 'sync'"),
    ],
)
def test_what_cannot_be_made_is_one_sentence_about_the_setting(env, message):
    with pytest.raises(ConfigError, match=message):
        make_environment(config_of(**env), 2, 0, "actor0")


def test_an_id_with_a_module_before_it_is_registered_by_importing_that(tmp_path, monkeypatch):
    (tmp_path / "own_worlds.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('own/Pole-v0', entry_point=CartPoleEnv, max_episode_steps=7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made = make_environment(config_of(id="gymnasium:own_worlds:own/Pole-v0"), 2, 0, "actor0")
    try:
        assert made.num_envs == 2
        assert made.spaces.max_episode_steps == 7
        assert made.reset(0)["policy"].shape == (2, 4)
    finally:
        made.close()
        gymnasium.registry.pop("own/Pole-v0")


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch):
    def entry_point(**kwargs):
        raise gymnasium.error.DependencyNotInstalled("thing is not installed")

    monkeypatch.setitem(gymnasium.registry, "Thing-v0", gymnasium.envs.registration.EnvSpec("Thing-v0", entry_point))
    with pytest.raises(ConfigError, match=r"pip install 'async-rl\[control\]'.*thing is not installed"):
        make_environment(config_of(id="gymnasium:Thing-v0"), 2, 0, "actor0")


def test_an_environment_that_does_not_reset_by_itself_is_refused():
    class Manual(VectorEnv):
        metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012
        num_envs = 2

    with pytest.raises(ConfigError, match=r"AutoresetMode\.NEXT_STEP or SAME_STEP"):
        GymnasiumEnvironment(Manual(), "actor0")


def test_a_picture_is_drawn_only_where_it_was_asked_for():
    class Drawn(Counting):
        render_mode = "rgb_array"

        def render(self):
            return np.full((4, 5, 3), 9, np.uint8)

    assert counting(AutoresetMode.NEXT_STEP)[0].render() is None
    picture = GymnasiumEnvironment(SyncVectorEnv([Drawn] * 2), "play").render()
    assert picture.shape == (4, 5, 3)


def test_a_time_limit_given_as_argument_is_known_and_kept():
    env = make_environment(config_of(kwargs={"max_episode_steps": 2}, vectorization="sync"), 2, 0, "actor0")
    assert env.spaces.max_episode_steps == 2
    env.reset(0)
    env.step(torch.zeros(2, 1, dtype=torch.int32))
    step = env.step(torch.zeros(2, 1, dtype=torch.int32))
    assert step.truncated.all()
    assert torch.equal(step.final_observations["policy"], step.observations["policy"])
