"""Plays a trained policy and films it: ``python -m actors.control.play CHECKPOINT --out FILE.gif|.mp4``.

checkpoint ─► Actor ─┐
                     ├─► film ─► pictures, one a step ─► write_pictures ─► FILE
env.id ─► N = 1 ─────┘        └► Episode: return, length ─► printed

Exit codes: 0 done; 1 the film could not be written; 2 an argument is wrong, or the environment has no picture.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from actors.control.environments.base import Environment
from actors.control.environments.factory import make_environment
from async_rl.config import ControlConfig
from async_rl.control.checkpoint import load_actor
from async_rl.control.networks import Actor
from async_rl.errors import AsyncRLError, ConfigError

Picture = npt.NDArray[np.uint8]
_FPS = 30
_GRAPHICS = (
    "on a machine without a screen MuJoCo draws with MUJOCO_GL=egl or MUJOCO_GL=osmesa, each with the system's library "
    "for it (libegl1, libosmesa6)"
)
_PACKAGES = {
    ".gif": (("PIL",), "pip install pillow"),
    ".mp4": (("imageio", "imageio_ffmpeg"), "pip install 'imageio[ffmpeg]'"),
}
"""What each kind of file needs."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode that was played."""

    total: float
    """Sum of its rewards."""
    length: int
    """Its steps."""
    ended: bool
    """False: it was still going on after ``--max-steps``."""


def play(path: Path, out: Path, episodes: int, seed: int, max_steps: int, tell: Callable[[Episode], None]) -> None:
    """Play episodes with the most likely actions and write a film of them.

    Args:
        path: run folder (its newest checkpoint) or checkpoint folder of a control run.
        out: file that ends in .gif or .mp4.
        episodes: to play one after the other.
        seed: of the first one's start; each has the one after.
        max_steps: after which an episode is left.
        tell: called with each episode when it is over.

    Raises:
        ConfigError: no checkpoint, no environment, no picture, or a package is missing.
    """
    config, spaces, actor = load_actor(path)
    check_output(out)
    env = _make(config, seed)
    try:
        if env.spaces.observations != spaces.observations or env.spaces.action != spaces.action:
            raise ConfigError(f"env.id = {config.env.id!r} has other spaces here than when {path} was trained")
        pictures = film(env, actor.to(env.device), config.env.id, episodes, seed, max_steps, tell)
        first = next(pictures)  # before the file is made: this is where an environment says that it has none
        write_pictures(itertools.chain([first], pictures), out)
    finally:
        env.close()


@torch.inference_mode()
def film(
    env: Environment,
    actor: Actor,
    env_id: str,
    episodes: int,
    seed: int,
    max_steps: int,
    tell: Callable[[Episode], None],
) -> Iterator[Picture]:
    """Pictures [H, W, 3]: one before each action, and the last one of an episode where the environment still shows it.

    Args:
        env: of one environment.
        actor: on the environment's device.
        env_id: its name, for messages.
        episodes: how many.
        seed: of the first episode's start; each has the one after.
        max_steps: after which an episode is left.
        tell: called with each episode when it is over.

    Raises:
        ConfigError: there is no picture.
    """
    for number in range(episodes):
        obs, state = env.reset(seed + number), actor.initial_state(1, env.device)
        total, length, ended = 0.0, 0, False
        while length < max_steps and not ended:
            yield picture_of(env, env_id)
            features, state = actor.step(actor.observe(obs), state)
            actions = actor.distribution(features).mode()
            seen = env.step(actions if env.spaces.action.kind == "continuous" else actions.int())
            obs, total, length = seen.observations, total + float(seen.rewards[0]), length + 1
            ended = bool(seen.terminated[0] | seen.truncated[0])
        tell(Episode(total, length, ended))
        if ended and seen.resets_next is not None:
            yield picture_of(env, env_id)


def picture_of(env: Environment, env_id: str) -> Picture:
    """What the first environment looks like.

    Raises:
        ConfigError: it has no picture, or fails to make one.
    """
    try:
        picture = env.render()
    except AsyncRLError:
        raise
    except Exception as error:  # foreign code: drawing fails in as many ways as there are graphics libraries
        raise ConfigError(f"env.id = {env_id!r} fails to draw: {error!r}; {_GRAPHICS}") from error
    if picture is None:
        raise ConfigError(f"env.id = {env_id!r} cannot render: it has no picture to show")
    return picture


def _make(config: ControlConfig, seed: int) -> Environment:
    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # read when mujoco is imported; without a screen GLFW cannot draw
    try:
        return make_environment(config, 1, seed, "play", render=True)
    except ConfigError as error:
        if error.__cause__ is None or not any(
            "OpenGL" in frame.filename or "mujoco" in frame.filename
            for frame in traceback.extract_tb(error.__cause__.__traceback__)
        ):
            raise
        raise ConfigError(f"{error}; {_GRAPHICS}") from error


def check_output(out: Path) -> None:
    """Refuse a file that cannot be written, before anything is played.

    Raises:
        ConfigError: another ending, no such folder, or a package is missing.
    """
    if out.suffix not in _PACKAGES:
        raise ConfigError(f"--out {out}: the file must end in {' or '.join(_PACKAGES)}")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    packages, install = _PACKAGES[out.suffix]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--out {out}: {out.suffix} needs {' and '.join(missing)}, not installed here: {install}")


def write_pictures(pictures: Iterable[Picture], out: Path) -> None:
    """Write a film of pictures [H, W, 3], one at a time; a GIF repeats for ever."""
    if out.suffix == ".mp4":
        import imageio

        with imageio.get_writer(out, fps=_FPS) as writer:
            for picture in pictures:
                writer.append_data(picture)
        return
    from PIL import Image

    frames = (Image.fromarray(picture).quantize(128, Image.Quantize.FASTOCTREE) for picture in pictures)
    next(frames).save(out, "GIF", save_all=True, append_images=frames, duration=1000 // _FPS, loop=0)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="async-rl play", description=play.__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--episodes", type=_at_least(1), default=1)
    parser.add_argument("--seed", type=_at_least(0), default=0)
    parser.add_argument("--max-steps", type=_at_least(1), default=1000)
    args = parser.parse_args(argv)
    out = args.out or args.checkpoint / "play.gif"
    torch.set_num_threads(1)
    try:
        play(args.checkpoint, out, args.episodes, args.seed, args.max_steps, _print_episode)
    except AsyncRLError as error:
        print(f"async-rl: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        print(f"async-rl: {error}", file=sys.stderr)
        return 1
    print(out)
    return 0


def _at_least(lowest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {lowest} on")
        return int(text)

    return parse


def _print_episode(episode: Episode) -> None:
    end = "" if episode.ended else " (still going on: --max-steps)"
    print(f"return {episode.total:.1f} in {episode.length} steps{end}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
