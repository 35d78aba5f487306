"""Cart-poles that ask for more than plain PPO: exploring without rewards, and imitating who sees more."""

from __future__ import annotations

import math

import torch

from actors.control.worlds.cartpole import MAX_X, BatchedCartPole


class SparseSwingUp(BatchedCartPole):
    """Swing the pole up from hanging; reward 1 only while it stands nearly upright near the centre.

    Nothing else tells which way to go, so that a policy that only tries its own noise sees no reward at all. The cart
    stops at walls and an episode ends by its limit alone. Action [N, 1], clipped to ±1, is a share of the force.

    Group ``policy`` [N, 5]: x, its speed, cos θ, sin θ, its speed.
    """

    MOTOR, WALL, CENTRE, UPRIGHT = 3.0, 2.4, 1.0, 0.9
    """Newtons, metres, metres, cosine of the angle. So weak a motor must swing several times to get the pole up."""

    def get_observations(self) -> dict[str, torch.Tensor]:
        """What the states look like now."""
        (x, angle), (speed, spin) = self._state.transpose(0, 1)
        return {"policy": torch.stack((x, speed, angle.cos(), angle.sin(), spin), 1)}

    def _starts(self, count: int) -> torch.Tensor:
        states = super()._starts(count)
        states[1, 0] += math.pi
        return states

    def _force(self, action: torch.Tensor) -> torch.Tensor:
        return action.clamp(-1, 1) * self.MOTOR

    def _push(self, force: torch.Tensor) -> None:
        super()._push(force)
        x, speed = self._state[0]
        x.clamp_(-self.WALL, self.WALL)
        speed.masked_fill_((x.abs() == self.WALL) & (speed * x > 0), 0.0)

    def _judge(self) -> tuple[torch.Tensor, torch.Tensor]:
        x, angle = self._state[:, 0]
        reached = (angle.cos() > self.UPRIGHT) & (x.abs() < self.CENTRE)
        return torch.zeros_like(reached), reached.float()


class SparseReach(BatchedCartPole):
    """Carry the pole to a place far from the start; reward 1 only while the cart is there and the pole still stands.

    Who has not learnt to balance never gets there, and nothing but the place pays for balancing: a policy that only
    tries its own noise falls near the start and sees no reward at all.
    """

    NEAR, FAR = 2.1, MAX_X
    """The place, metres from the middle, on the right."""

    def _judge(self) -> tuple[torch.Tensor, torch.Tensor]:
        fallen, _ = super()._judge()
        x = self._state[0, 0]
        return fallen, ((x > self.NEAR) & (x < self.FAR) & ~fallen).float()


class PrivilegedCartPole(BatchedCartPole):
    """For distillation: a teacher sees all, a student only where cart and pole are.

    Groups: ``teacher`` [N, 4] as ``policy`` of the other; ``policy``: x and θ, [N, 2], and with ``previous`` those of
    the step before behind them, [N, 4], from which speeds can be told.

    Args:
        num_envs: N.
        seed: of the starts.
        device: where it computes.
        max_steps: an episode is cut off after so many.
        previous: whether the student sees the step before, too; without it only a recurrent student can follow.
        noise: deviation of what is added to the student's view.
    """

    def __init__(
        self,
        num_envs: int,
        seed: int = 0,
        device: str = "cpu",
        max_steps: int = 500,
        previous: bool = True,
        noise: float = 0.0,
    ) -> None:
        self._shows_previous, self._noise = previous, noise
        super().__init__(num_envs, seed, device, max_steps)

    def get_observations(self) -> dict[str, torch.Tensor]:
        """What teacher and student see now."""
        now = self._state[:, 0]
        seen = torch.cat((now, self._previous)) if self._shows_previous else now
        view = seen.t().contiguous()
        if self._noise > 0:
            view += torch.randn(view.shape, generator=self._generator, device=self.device) * self._noise
        return {"policy": view, "teacher": super().get_observations()["policy"]}

    def _begin(self, state: torch.Tensor) -> None:
        super()._begin(state)
        self._previous = state[:, 0].clone()

    def _push(self, force: torch.Tensor) -> None:
        self._previous.copy_(self._state[:, 0])
        super()._push(force)

    def _restart(self, which: torch.Tensor) -> None:
        super()._restart(which)
        self._previous[:, which] = self._state[:, 0, which]
