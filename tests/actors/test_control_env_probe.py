"""The child that tries the environment before a run."""

import subprocess
import sys
import types

import pytest
import torch

from actors.control.probe import main, probe
from async_rl.config import to_toml
from async_rl.config.load import parse_control
from async_rl.control.spaces import FILE, Spaces
from async_rl.errors import ConfigError

WORLD = "actors.control.worlds.pendulum:BatchedPendulum"


def config_of(env_id, algorithm="ppo", **kwargs):
    return parse_control(
        {"domain": "control", "env": {"id": env_id, "kwargs": kwargs}, "algorithm": {"name": algorithm}}
    )


@pytest.mark.real
def test_the_probe_writes_spaces(tmp_path):
    config = config_of(WORLD, hide_velocity=True)
    (tmp_path / "config.toml").write_text(to_toml(config))
    command = [sys.executable, "-m", "actors.control.probe", str(tmp_path / "config.toml"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert Spaces.read(tmp_path / FILE) == probe(config)


def test_what_is_wrong_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.toml").write_text(to_toml(config_of(WORLD, wheels=3)))
    monkeypatch.setattr(sys, "argv", ["probe", str(tmp_path / "config.toml"), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("async-rl: env.id = ")
    assert not (tmp_path / FILE).exists()


def test_an_environment_that_calls_sys_exit_does_not_pass_for_a_sound_one(tmp_path, monkeypatch, capsys):
    module = types.ModuleType("leaver")
    module.make = lambda num_envs, seed: sys.exit(0)
    monkeypatch.setitem(sys.modules, "leaver", module)
    (tmp_path / "config.toml").write_text(to_toml(config_of("leaver:make")))
    monkeypatch.setattr(sys, "argv", ["probe", str(tmp_path / "config.toml"), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "the environment ended its process with sys.exit()" in capsys.readouterr().err


def test_discrete_and_continuous_environments_pass_and_so_do_alike_starts():
    assert probe(config_of("gymnasium:CartPole-v1")).action.kind == "discrete"
    assert probe(config_of("gymnasium:CartPole-v1", "grpo")).action.kind == "discrete"
    assert probe(config_of(WORLD, "grpo")).action.kind == "continuous"


class Faulty:
    """Two environments, right but for what the test breaks."""

    num_envs, num_actions, device = 2, 1, "cpu"

    def __init__(self, **broken):
        good = {"seen": torch.zeros(2, 3), "rewards": torch.zeros(2), "dones": torch.zeros(2, dtype=torch.bool)}
        self.says, self.closed = good | broken, False

    def get_observations(self):
        return {"policy": torch.zeros(2, 3)}

    def step(self, actions):
        if self.says["seen"] is None:
            raise RuntimeError("out of fuel")
        return {"policy": self.says["seen"]}, self.says["rewards"], self.says["dones"], {}

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"rewards": torch.zeros(2, 1)}, r"rewards \[2, 1\] of torch.float32; expected one for each of 2"),
        ({"rewards": torch.tensor([0.0, float("nan")])}, r"rewards of a step are \[0.0, nan\]"),
        ({"dones": torch.zeros(2, 1)}, r"gives dones \[2, 1\] in a step; expected \[2\]"),
        ({"seen": torch.zeros(2, 4)}, r"after step, observation group 'policy' is \[2, 4\].*expected \[2, 3\]"),
        ({"seen": torch.full((2, 3), torch.inf)}, "after step, observation group 'policy' has numbers"),
        ({"seen": None}, r"a step with actions \[2, 1\] failed: RuntimeError\('out of fuel'\)"),
    ],
)
def test_what_a_step_gives_wrong_is_said_and_the_environment_closed(monkeypatch, broken, message):
    made = Faulty(**broken)
    module = types.ModuleType("my_faulty")
    module.make = lambda num_envs, seed: made
    monkeypatch.setitem(sys.modules, "my_faulty", module)
    with pytest.raises(ConfigError, match=message):
        probe(config_of("my_faulty:make"))
    assert made.closed
