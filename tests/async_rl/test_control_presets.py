"""Control presets keep to their terms, the examples of docs/control.md run, the benchmark compares like with like."""

import importlib.util
import os
import re
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

from actors.control.environments.factory import make_environment
from async_rl.config import load_control, parse_control, preset_names

ROOT = Path(__file__).resolve().parents[2]
CONTROL = [
    name for name in preset_names() if 'domain = "control"' in (ROOT / f"async_rl/presets/{name}.toml").read_text()
]


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench():
    return load_script("bench_control")


def env_steps(config):
    return config.steps * config.env.num_envs * config.env.horizon * config.buffer.groups_per_step


@pytest.mark.parametrize("name", CONTROL)
def test_a_control_preset_loads_and_is_called_like_its_file(name):
    assert load_control(name).name == name


@pytest.mark.parametrize(("name", "most"), [("cartpole", 400_000), ("halfcheetah", 2_000_000)])
def test_a_preset_stays_inside_its_budget_of_environment_steps(name, most):
    assert env_steps(load_control(name)) <= most


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_cartpole_takes_any_bound_without_other_changes(eta):
    assert load_control("cartpole", (f"buffer.max_staleness={eta}",)).buffer.max_staleness == eta


def test_the_variant_without_rnd_that_the_preset_names_is_accepted():
    text = (ROOT / "async_rl/presets/cartpole-rnd.toml").read_text()
    comment = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    overrides = tuple(re.findall(r"--set (\S*?=[^\s)]*)", comment))
    assert overrides == ("rnd.weight=0", "rnd.hidden=")
    plain, full = load_control("cartpole-rnd", overrides), load_control("cartpole-rnd")
    assert plain.rnd.weight == 0 < full.rnd.weight
    assert plain.algorithm == full.algorithm


def test_noise_finds_no_reward_in_the_world_of_the_rnd_preset():
    config = load_control("cartpole-rnd")
    env = make_environment(config, 256, 0, "test")
    env.reset(0)
    generator = torch.Generator().manual_seed(0)
    rewards = [env.step(torch.randn(256, 1, generator=generator)).rewards.sum() for _ in range(400)]
    assert sum(rewards) == 0


def test_the_environment_and_the_settings_of_the_documentation_run(tmp_path, monkeypatch):
    blocks = re.findall(r"```(python|toml)\n# (\w+\.\w+).*?\n(.*?)```", (ROOT / "docs/control.md").read_text(), re.S)
    files = {file: text for _, file, text in blocks}
    (tmp_path / "reach.py").write_text(files["reach.py"])
    monkeypatch.syspath_prepend(tmp_path)
    config = parse_control(tomllib.loads(files["reach.toml"]))
    env = make_environment(config, 64, 0, "test")
    seen = env.reset(0)["policy"]
    for _ in range(99):
        step = env.step(-seen)  # towards 0
        assert not step.truncated.any()
        seen = step.observations["policy"]
    assert seen.abs().max() < 0.01
    assert step.rewards.min() > 0.99
    assert env.step(-seen).truncated.all()


def test_figures_begin_after_the_warm_up_and_the_goal_counts_from_the_first_step(bench):
    plan = bench.Plan(num_envs=100, horizon=10, iterations=3, warmup=1)
    rows = [
        bench.Row(10.0, 0, None),
        bench.Row(14.0, 1000, 200.0),  # slow: it warms up
        bench.Row(15.0, 2000, 480.0),
        bench.Row(16.0, 3000, 470.0),
    ]
    meter = bench.CpuMeter(0)
    meter._times, meter._totals = [0.0, 14.0, 16.0], [0.0, 8.0, 12.0]
    found = bench.figures("ours", "cartpole", 0, rows, plan, 7.0, meter)
    assert found.steps_per_s == 1000  # 2000 in 2 s
    assert found.steps_per_cpu_s == 500  # and 4 CPU seconds
    assert found.cores == 2
    assert (found.seconds_to_goal, found.steps_to_goal) == (5.0, 2000)
    assert found.start_s == 3.0


def test_the_meter_counts_the_seconds_of_this_process(bench):
    meter = bench.CpuMeter(os.getpid())
    meter.sample()
    began, used = time.time(), time.process_time()
    while time.process_time() < used + 0.3:
        sum(range(10_000))
    ended = time.time()
    meter.sample()
    assert meter.at(ended) - meter.at(began) == pytest.approx(0.3, abs=0.1)


def test_a_median_with_a_run_that_never_arrived_counts_it_as_slowest(bench):
    assert bench._median([3.0, None, 1.0]) == 3.0
    assert bench._median([None, None, 1.0]) is None


@pytest.mark.parametrize("world", ["cartpole", "pendulum"])
@pytest.mark.parametrize("actors", [1, 2])
def test_both_systems_are_asked_for_the_same(bench, world, actors):
    plan = bench.Plan(num_envs=2048, horizon=24, iterations=5, warmup=1)
    ours = parse_control(tomllib.loads(bench.toml(world, 0, plan, actors)))
    asked = {"gamma": bench.GAMMAS[world], "hidden": [64, 64], "horizon": 24, "epochs": 5, "minibatches": 4}
    theirs = load_script("bench_rsl_rl").settings(asked)
    algorithm = theirs["algorithm"]
    assert env_steps(ours) == 5 * 2048 * theirs["num_steps_per_env"]
    assert list(ours.policy.hidden) == theirs["actor"]["hidden_dims"] == theirs["critic"]["hidden_dims"]
    assert ours.policy.activation == theirs["actor"]["activation"]
    for key, name in {
        "gamma": "gamma",
        "lam": "lam",
        "clip": "clip_param",
        "value_clip": "clip_param",
        "entropy_coef": "entropy_coef",
        "epochs": "num_learning_epochs",
        "minibatches": "num_mini_batches",
    }.items():
        assert getattr(ours.algorithm, key) == algorithm[name], key
    assert (ours.learner.lr, ours.learner.kl_target) == (algorithm["learning_rate"], algorithm["desired_kl"])
    assert (ours.learner.lr_schedule, algorithm["schedule"]) == ("kl_adaptive", "adaptive")
    assert ours.policy.init_std == 1.0  # the default there, too
    assert (ours.algorithm.reward_scale, ours.learner.max_grad_norm, ours.algorithm.value_coef) == (1.0, 1.0, 1.0)
