"""The rsl_rl side of scripts/bench_control.py: its stock ``OnPolicyRunner`` on one of our batched worlds, one process.

    world (torch) ──► World: rsl_rl's VecEnv ──► OnPolicyRunner.learn ──► ROWS: JSON, a line each

Runs in any environment that has ``rsl-rl-lib``; of this project it imports the worlds alone, which need torch and
numpy. A line is written at the start and after each iteration: ``time`` (epoch seconds), ``steps`` (of environments, so
far) and ``mean_return`` of the last 100 episodes, null before the first one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from actors.control.worlds.cartpole import BatchedCartPole
from actors.control.worlds.pendulum import BatchedPendulum

WORLDS = {"cartpole": BatchedCartPole, "pendulum": BatchedPendulum}


class World(VecEnv):
    """Adds to a world what rsl_rl asks for, and counts returns."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.num_envs, self.num_actions, self.device, self.cfg = world.num_envs, world.num_actions, "cpu", {}
        self.max_episode_length = world.max_episode_length
        self._returns = torch.zeros(self.num_envs)
        self._last: deque[float] = deque(maxlen=100)

    @property
    def episode_length_buf(self) -> torch.Tensor:
        """Steps of the running episodes."""
        return self._world.episode_length_buf

    @episode_length_buf.setter
    def episode_length_buf(self, value: torch.Tensor) -> None:
        self._world.episode_length_buf = value

    def get_observations(self) -> TensorDict:
        """Group ``policy``."""
        return TensorDict(self._world.get_observations(), batch_size=[self.num_envs])

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Observations, rewards, dones, extras."""
        observations, rewards, dones, extras = self._world.step(actions)
        self._returns += rewards
        if dones.any():
            self._last.extend(self._returns[dones].tolist())
            self._returns[dones] = 0
        time_outs = {"time_outs": extras["time_outs"].float()}
        return TensorDict(observations, batch_size=[self.num_envs]), rewards, dones.float(), time_outs

    def mean_return(self) -> float | None:
        """Over the last 100 episodes; None before the first one ended."""
        return sum(self._last) / len(self._last) if self._last else None


def main() -> None:
    """Train for as many iterations as are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=json.loads, help="what bench_control.py asks for, as JSON")
    parser.add_argument("rows", type=Path, help="file that is written")
    arguments = parser.parse_args()
    plan = arguments.plan
    torch.manual_seed(plan["seed"])
    world = World(WORLDS[plan["world"]](plan["num_envs"], seed=plan["seed"]))
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # it prints its networks
        runner = OnPolicyRunner(world, settings(plan), log_dir=None, device="cpu")
    with arguments.rows.open("w", buffering=1) as rows:

        def write(iterations: int) -> None:
            steps = iterations * plan["num_envs"] * plan["horizon"]
            row = {"time": time.time(), "steps": steps, "mean_return": world.mean_return()}
            rows.write(json.dumps(row) + "\n")

        def log(it: int, **_: Any) -> None:
            write(it + 1)

        runner.logger.log = log
        write(0)
        runner.learn(plan["iterations"], init_at_random_ep_len=False)


def settings(plan: dict[str, Any]) -> dict[str, Any]:
    """rsl_rl's configuration."""
    network = {"class_name": "MLPModel", "hidden_dims": plan["hidden"], "activation": "elu"}
    return {
        "num_steps_per_env": plan["horizon"],
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": plan["epochs"],
            "num_mini_batches": plan["minibatches"],
            "gamma": plan["gamma"],
            "lam": 0.95,
            "learning_rate": 1e-3,
            "schedule": "adaptive",
            "desired_kl": 0.01,
            "entropy_coef": 0.0,
            "clip_param": 0.2,
        },
        "actor": {**network, "distribution_cfg": {"class_name": "GaussianDistribution"}},
        "critic": dict(network),
    }


if __name__ == "__main__":
    main()
