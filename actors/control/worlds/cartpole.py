"""Cart-poles, N at once in torch, behind rsl_rl's ``VecEnv`` interface, with the dynamics of gymnasium's CartPole-v1.

                  │ θ
                 ╱            state: position x, its speed, angle θ (0 is up), its speed
            ┌───┴──┐ ─► force
    ────────┴─o──o─┴────────  x

Barto, Sutton and Anderson 1983; equations of Florian 2005 ("Correct equations for the dynamics of the cart-pole
system"), integrated by Euler steps of 0.02 s.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from actors.control.worlds.drawing import Canvas

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, DT = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
"""m/s², kg, kg, m, N, s"""
MAX_X, MAX_ANGLE = 2.4, 12 * 2 * math.pi / 360
"""The pole has fallen beyond these."""
_TOTAL, _MOMENT = CART + POLE, POLE * HALF_LENGTH


class BatchedCartPole:
    """Keep the pole up: one continuous action pushes the cart right where it is positive, else left; +1 a step.

    Group ``policy`` [N, 4]: x, its speed, θ, its speed.

    Args:
        num_envs: N.
        seed: of the starts.
        device: where it computes.
        max_steps: an episode is cut off after so many.
    """

    num_actions = 1

    def __init__(self, num_envs: int, seed: int = 0, device: str = "cpu", max_steps: int = 500) -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.max_episode_length = max_steps
        self.cfg: dict[str, Any] = {}
        self.reset(seed)

    def reset(self, seed: int | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Start all anew; observations and extras."""
        self._seed(seed)
        self._begin(self._starts(self.num_envs))
        return self.get_observations(), {}

    def reset_alike(self, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Start all in the same state; observations and extras."""
        self._seed(seed)
        self._begin(self._starts(1).repeat(1, 1, self.num_envs))
        return self.get_observations(), {}

    def get_observations(self) -> dict[str, torch.Tensor]:
        """What the states look like now."""
        return {"policy": self._state.view(4, -1).t().contiguous()}

    def step(
        self, actions: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Apply actions [N, 1]: observations, rewards [N], dones [N], extras with ``time_outs`` [N]."""
        self._push(self._force(actions[:, 0]))
        self.episode_length_buf += 1
        failed, rewards = self._judge()
        time_outs = (self.episode_length_buf >= self.max_episode_length) & ~failed
        dones = failed | time_outs
        self._restart(dones.nonzero()[:, 0])
        return self.get_observations(), rewards, dones, {"time_outs": time_outs}

    def render(self) -> npt.NDArray[np.uint8]:
        """Picture [H, W, 3] of the first cart-pole."""
        x, angle = (float(value) for value in self._state[:, 0, 0])
        canvas = Canvas(200, 120, 5.6, middle=0.6)
        canvas.line((-2.6, 0), (2.6, 0), 0.02, (120, 120, 120))
        canvas.line((x - 0.25, 0.08), (x + 0.25, 0.08), 0.12, (40, 40, 60))
        tip = (x + 2 * HALF_LENGTH * math.sin(angle), 0.15 + 2 * HALF_LENGTH * math.cos(angle))
        canvas.line((x, 0.15), tip, 0.05, (200, 120, 60))
        return canvas.pixels

    def _seed(self, seed: int | None) -> None:
        if seed is not None:
            self._generator = torch.Generator(self.device).manual_seed(seed)

    def _begin(self, state: torch.Tensor) -> None:
        """Take states [x and θ, value and speed, N] as beginnings."""
        self._state = state
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)

    def _restart(self, which: torch.Tensor) -> None:
        if len(which):
            self._state[:, :, which] = self._starts(len(which))
            self.episode_length_buf[which] = 0

    def _starts(self, count: int) -> torch.Tensor:
        """States [2, 2, count] at the beginning of an episode."""
        return torch.rand(2, 2, count, generator=self._generator, device=self.device) * 0.1 - 0.05

    def _force(self, action: torch.Tensor) -> torch.Tensor:
        """Newtons [N] of actions [N]."""
        return torch.where(action > 0, FORCE, -FORCE)

    def _judge(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether the pole has fallen [N], and the rewards [N]."""
        x, angle = self._state[:, 0].abs()
        return (x > MAX_X) | (angle > MAX_ANGLE), torch.ones(self.num_envs, device=self.device)

    def _push(self, force: torch.Tensor) -> None:
        """One Euler step under forces [N]."""
        angle, spin = self._state[1]
        cos, sin = angle.cos(), angle.sin()
        push = (spin.square() * sin).mul_(_MOMENT).add_(force).div_(_TOTAL)
        turn = (sin * GRAVITY).addcmul_(cos, push, value=-1)
        turn /= cos.square().mul_(-HALF_LENGTH * POLE / _TOTAL).add_(HALF_LENGTH * 4 / 3)
        run = push.addcmul_(turn, cos, value=-_MOMENT / _TOTAL)
        self._state[:, 0].add_(self._state[:, 1], alpha=DT)
        self._state[0, 1].add_(run, alpha=DT)
        self._state[1, 1].add_(turn, alpha=DT)
