"""Playing a policy: which pictures are taken, what is said about episodes, and what is refused in one sentence."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from actors.control import play as playing
from actors.control.environments.factory import make_environment
from actors.control.play import main, picture_of
from async_rl.config import parse_control, to_toml
from async_rl.control.networks import build_actor
from async_rl.errors import ConfigError

Image = pytest.importorskip("PIL.Image")
SHADE = 20


class World:
    """rsl_rl's interface: an episode of ``length`` steps whose reward is the action; each state is a shade of grey."""

    num_actions = 1

    def __init__(self, num_envs, seed, length=5, drawn=True, broken=False):
        self.num_envs, self.length, self.steps, self.start = num_envs, length, 0, 0.0
        if broken:
            self.render = lambda: 1 / 0
        elif drawn:
            self.render = lambda: np.full((8, 12, 3), SHADE * (1 + self.steps), np.uint8)

    def reset(self, seed):
        self.steps, self.start = 0, float(seed)

    def get_observations(self):
        return {"policy": torch.full((self.num_envs, 3), float(self.steps))}

    def step(self, actions):
        self.steps += 1
        done = self.steps == self.length
        self.steps %= self.length
        dones = torch.full((self.num_envs,), done)
        return self.get_observations(), actions[:, 0].clone(), dones, {"time_outs": torch.zeros_like(dones)}


def write_checkpoint(folder, env_id="test_control_play:World", bias=0.5, network="mlp", **kwargs):
    """A policy whose action is ``bias``, in an environment."""
    config = parse_control(
        {
            "domain": "control",
            "env": {"id": env_id, "kwargs": kwargs},
            "policy": {"hidden": [4], "network": network, **({} if network == "mlp" else {"rnn_hidden": 3})},
        }
    )
    spaces = make_environment(config, 1, 0, "test").spaces
    actor = build_actor(config, spaces)
    with torch.no_grad():
        for parameter in actor.head.parameters():
            parameter.zero_()
        actor.head.bias.fill_(bias)
    folder.mkdir(parents=True)
    save_file(actor.state_dict(), folder / "policy.safetensors")
    (folder / "config.toml").write_text(to_toml(config))
    spaces.write(folder)
    return folder


def frames(file):
    """Shade of each picture of a GIF, in steps."""
    shades = []
    with Image.open(file) as film:
        for frame in range(film.n_frames):
            film.seek(frame)
            shades.append(round(np.asarray(film.convert("RGB")).mean() / SHADE))
    return shades


def test_an_episode_is_filmed_step_by_step_and_its_return_is_told(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "c")
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == ["return 2.5 in 5 steps", str(folder / "play.gif")]
    assert frames(folder / "play.gif") == [1, 2, 3, 4, 5]  # what followed the end was the next episode
    with Image.open(folder / "play.gif") as film:
        assert film.size == (12, 8)
        assert film.info["loop"] == 0


def test_episodes_follow_each_other_and_are_left_after_max_steps(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "c", network="lstm")
    out = tmp_path / "film.gif"
    assert main([str(folder), "--out", str(out), "--episodes", "2", "--max-steps", "3"]) == 0
    line = "return 1.5 in 3 steps (still going on: --max-steps)"
    assert capsys.readouterr().out.splitlines() == [line, line, str(out)]
    assert frames(out) == [1, 2, 3, 1, 2, 3]


def test_the_last_picture_of_an_episode_is_shown_where_the_environment_resets_a_step_later(tmp_path, capsys):
    gymnasium = pytest.importorskip("gymnasium")

    class Counting(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)
        metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

        def __init__(self, render_mode=None):
            self.render_mode, self.steps = render_mode, 0

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.steps = 0
            return np.zeros(2, np.float32), {}

        def step(self, action):
            self.steps += 1
            return np.zeros(2, np.float32), 2.0, self.steps == 3, False, {}

        def render(self):
            return np.full((8, 8, 3), SHADE * (1 + self.steps), np.uint8)

    gymnasium.register("CountingForPlay-v0", Counting)
    try:
        folder = write_checkpoint(tmp_path / "c", "gymnasium:CountingForPlay-v0")
        assert main([str(folder), "--episodes", "2"]) == 0
    finally:
        del gymnasium.registry["CountingForPlay-v0"]
    assert capsys.readouterr().out.splitlines()[:2] == ["return 6.0 in 3 steps"] * 2
    assert frames(folder / "play.gif") == [1, 2, 3, 4, 1, 2, 3, 4]


def test_episodes_begin_with_the_seed_and_the_ones_after_it(tmp_path, monkeypatch):
    starts = []
    folder = write_checkpoint(tmp_path / "c")
    made = playing.make_environment

    def watched(*args, **kwargs):
        env = made(*args, **kwargs)
        reset = env.reset
        monkeypatch.setattr(env, "reset", lambda seed: (starts.append(seed), reset(seed))[1])
        return env

    monkeypatch.setattr(playing, "make_environment", watched)
    assert main([str(folder), "--episodes", "3", "--seed", "7"]) == 0
    assert starts == [7, 8, 9]


def test_an_environment_without_a_picture_is_refused_and_nothing_is_written(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "c", drawn=False)
    assert main([str(folder)]) == 2
    told = capsys.readouterr()
    assert told.err == "async-rl: env.id = 'test_control_play:World' cannot render: it has no picture to show\n"
    assert told.out == ""
    assert not (folder / "play.gif").exists()


def test_an_environment_that_fails_to_draw_is_told_with_what_mujoco_needs():
    class Broken:
        def render(self):
            raise RuntimeError("no context")

    with pytest.raises(ConfigError, match=r"'x' fails to draw: RuntimeError\('no context'\); .*MUJOCO_GL=egl"):
        picture_of(Broken(), "x")


def test_drawing_that_fails_is_exit_code_2(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "c", broken=True)
    assert main([str(folder)]) == 2
    assert "fails to draw: ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "message"),
    [("film.avi", "must end in .gif or .mp4"), ("no/film.gif", "there is no folder"), ("film", "must end in")],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_played(
    tmp_path, monkeypatch, capsys, out, message
):
    folder = write_checkpoint(tmp_path / "c")
    monkeypatch.setattr(playing, "make_environment", lambda *_, **__: pytest.fail("played"))
    assert main([str(folder), "--out", str(tmp_path / out)]) == 2
    assert message in capsys.readouterr().err


def test_a_package_that_a_film_needs_is_named(tmp_path, monkeypatch, capsys):
    folder = write_checkpoint(tmp_path / "c")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "imageio_ffmpeg" else found(name))
    assert main([str(folder), "--out", str(tmp_path / "film.mp4")]) == 2
    assert ".mp4 needs imageio_ffmpeg, not installed here: pip install 'imageio[ffmpeg]'" in capsys.readouterr().err


def test_an_environment_that_changed_since_training_is_refused(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "c")
    file = folder / "spaces.json"
    file.write_text(file.read_text().replace('"float32"', '"int32"'))
    assert main([str(folder)]) == 2
    assert "has other spaces here than when" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--episodes", "0"], ["--max-steps", "0"], ["--seed", "-1"]])
def test_numbers_that_mean_nothing_are_refused(tmp_path, capsys, option):
    with pytest.raises(SystemExit) as exit_:
        main([str(tmp_path), *option])
    assert exit_.value.code == 2
    assert f"argument {option[0]}" in capsys.readouterr().err


@pytest.mark.real
def test_the_command_plays_a_run_folder(tmp_path):
    write_checkpoint(tmp_path / "checkpoints" / "step_3")
    done = subprocess.run(
        [sys.executable, "-m", "async_rl", "play", str(tmp_path), "--episodes", "2"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["return 2.5 in 5 steps"] * 2 + [str(tmp_path / "play.gif")]
    assert frames(tmp_path / "play.gif") == [1, 2, 3, 4, 5] * 2
