"""Pendulums, N at once in torch, behind rsl_rl's ``VecEnv`` interface, with the dynamics of gymnasium's Pendulum-v1.

    ╲ θ          state: angle θ (0 is up), its speed
     ╲
      o ◄ torque

Semi-implicit Euler steps of 0.05 s; an episode ends by its limit alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from actors.control.worlds.drawing import Canvas

GRAVITY, TORQUE, MAX_SPIN, DT = 10.0, 2.0, 8.0, 0.05
"""m/s², N·m, rad/s, s; a rod of 1 kg and 1 m"""


class BatchedPendulum:
    """Swing up and stay: actions [N, 1] are torques, clipped to ±2 N·m; the reward is -(θ² + 0.1 θ'² + 0.001 torque²).

    Groups: ``policy``: cos θ, sin θ, and the speed unless it is hidden; ``full`` [N, 3]: all three.

    Args:
        num_envs: N.
        seed: of the starts.
        device: where it computes.
        max_steps: an episode is cut off after so many.
        hide_velocity: whether ``policy`` lacks the speed, so that a policy must remember.
    """

    num_actions = 1

    def __init__(
        self, num_envs: int, seed: int = 0, device: str = "cpu", max_steps: int = 200, hide_velocity: bool = False
    ) -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.max_episode_length = max_steps
        self.cfg: dict[str, Any] = {}
        self._seen = 2 if hide_velocity else 3
        self.reset(seed)

    def reset(self, seed: int | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Start all anew; observations and extras."""
        self._seed(seed)
        self._begin(self._starts(self.num_envs))
        return self.get_observations(), {}

    def reset_alike(self, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Start all in the same state; observations and extras."""
        self._seed(seed)
        self._begin(self._starts(1).repeat(1, self.num_envs))
        return self.get_observations(), {}

    def get_observations(self) -> dict[str, torch.Tensor]:
        """What the states look like now."""
        angle, spin = self._state
        full = torch.stack((angle.cos(), angle.sin(), spin), 1)
        return {"policy": full[:, : self._seen], "full": full}

    def step(
        self, actions: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Apply actions [N, 1]: observations, rewards [N], dones [N], extras with ``time_outs`` [N]."""
        torque = actions[:, 0].clamp(-TORQUE, TORQUE)
        angle, spin = self._state
        off = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        rewards = -(off.square() + 0.1 * spin.square() + 0.001 * torque.square())
        spin.add_(angle.sin(), alpha=1.5 * GRAVITY * DT).add_(torque, alpha=3 * DT).clamp_(-MAX_SPIN, MAX_SPIN)
        angle.add_(spin, alpha=DT)
        self.episode_length_buf += 1
        dones = self.episode_length_buf >= self.max_episode_length
        over = dones.nonzero()[:, 0]
        if len(over):
            self._state[:, over] = self._starts(len(over))
            self.episode_length_buf[over] = 0
        return self.get_observations(), rewards, dones, {"time_outs": dones}

    def render(self) -> npt.NDArray[np.uint8]:
        """Picture [H, W, 3] of the first pendulum."""
        angle = float(self._state[0, 0])
        canvas = Canvas(120, 120, 2.6, middle=0.5)
        canvas.line((0, 0), (math.sin(angle), math.cos(angle)), 0.08, (200, 80, 70))
        canvas.line((0, 0), (0, 0), 0.04, (0, 0, 0))
        return canvas.pixels

    def _seed(self, seed: int | None) -> None:
        if seed is not None:
            self._generator = torch.Generator(self.device).manual_seed(seed)

    def _begin(self, state: torch.Tensor) -> None:
        """Take states [angle and speed, N] as beginnings."""
        self._state = state
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)

    def _starts(self, count: int) -> torch.Tensor:
        """States [2, count] at the beginning of an episode: any angle, speeds in ±1."""
        states = torch.rand(2, count, generator=self._generator, device=self.device) * 2 - 1
        states[0] *= math.pi
        return states
