"""The arrays of one fragment while it is gathered: allocated once, filled row by row, sent without copying.

obs/GROUP has T + 1 rows: row t is what the policy sees before step t, the last one is ``last_obs``
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from actors.control.environments.base import Environment, Observations, Step
from actors.control.policy import Policy, State
from actors.control.tally import Finished, Running, tally
from async_rl.control.fragment import FINAL_OBS, HIDDEN, LAST_OBS, OBS
from async_rl.data import Array

_DTYPES = {"float32": torch.float32, "uint8": torch.uint8, "int32": torch.int32}


class Record:
    """T steps of N environments, of which the first :attr:`num_steps` are made.

    Args:
        environment: whose outcomes it takes; their arrays are kept on its device until the fragment is complete.
        policy: whose acts it takes, likewise.
        horizon: T
        state: hidden state before the first step.
    """

    def __init__(self, environment: Environment, policy: Policy, horizon: int, state: State) -> None:
        size, device = (horizon, environment.num_envs), environment.device
        self.num_steps = 0
        self.observations = {
            name: torch.empty((horizon + 1, size[1], *space.shape), dtype=_DTYPES[space.dtype], device=device)
            for name, space in environment.spaces.observations.items()
        }
        """By group [T + 1, N, ...]."""
        act = torch.float32 if policy.action.kind == "continuous" else torch.int32
        self._actions = torch.empty((*size, policy.action.size), dtype=act, device=policy.device)
        self._logprobs = torch.empty(size, device=policy.device)
        self._rewards = torch.empty(size, device=device)
        self._terminated = torch.empty(size, dtype=torch.bool, device=device)
        self._truncated = torch.empty(size, dtype=torch.bool, device=device)
        self._resets = torch.zeros(size, dtype=torch.bool, device=device)
        self._versions = np.empty((horizon, 1), np.int32)
        self._finals: list[Observations] = []
        self._names, self._state = policy.hidden, state

    def see(self, row: int, observations: Observations) -> None:
        """What the policy sees before step ``row``; T: behind the last one."""
        for name, array in self.observations.items():
            array[row].copy_(observations[name])

    def act(self, actions: torch.Tensor, logprobs: torch.Tensor, version: int, resets: torch.Tensor | None) -> None:
        """What the policy does in the next step.

        Args:
            actions: [N, A]
            logprobs: [N]
            version: that acted.
            resets: bool [N]: environments that this step only resets; None: none.
        """
        row = self.num_steps
        self._actions[row].copy_(actions)
        self._logprobs[row].copy_(logprobs)
        self._versions[row] = version
        if resets is not None:
            self._resets[row].copy_(resets)

    def take(self, step: Step) -> None:
        """What came of it; the step is made."""
        row = self.num_steps
        self._rewards[row].copy_(step.rewards)
        self._terminated[row].copy_(step.terminated)
        self._truncated[row].copy_(step.truncated)
        if step.final_observations is not None:
            self._finals.append({name: rows.clone() for name, rows in step.final_observations.items()})
        self.num_steps = row + 1
        self.see(row + 1, step.observations)

    @property
    def has_acted(self) -> bool:
        """Whether an action counted in the steps made so far; else all of them only reset environments."""
        return not bool(self._resets[: self.num_steps].all())

    def tally(self, before: Running) -> tuple[Finished, Running]:
        """Episodes that ended in the steps made so far, and those that go on."""
        made = slice(0, self.num_steps)
        ends = (self._terminated[made] | self._truncated[made]).cpu().numpy()
        return tally(self._rewards[made].cpu().numpy(), ends, ~self._resets[made].cpu().numpy(), before)

    def arrays(self, finished: Finished) -> dict[str, Array]:
        """The complete fragment, see :mod:`async_rl.control.fragment`."""
        observations = {name: array.cpu().numpy() for name, array in self.observations.items()}
        truncated = self._truncated.cpu().numpy()
        return {
            **{OBS + name: array[:-1] for name, array in observations.items()},
            **{LAST_OBS + name: array[-1:] for name, array in observations.items()},
            **self._final_arrays(int(truncated.sum())),
            **{HIDDEN + n: part.cpu().numpy() for n, part in zip(self._names, self._state, strict=True)},
            "actions": self._actions.cpu().numpy(),
            "logprobs": self._logprobs.cpu().numpy(),
            "versions": np.where(self._resets.cpu().numpy(), np.int32(-1), self._versions),
            "step_rewards": self._rewards.cpu().numpy(),
            "terminated": self._terminated.cpu().numpy(),
            "truncated": truncated,
            "episode_returns": finished.returns,
            "episode_lengths": finished.lengths,
        }

    def _final_arrays(self, num_truncated: int) -> Mapping[str, Array]:
        """Empty arrays where nothing was truncated, none at all where the environment does not tell."""
        told: dict[str, Array] = {}
        for name, array in self.observations.items():
            rows = torch.cat([array[0, :0], *(finals[name] for finals in self._finals)])
            if len(rows) == num_truncated:
                told[FINAL_OBS + name] = rows.cpu().numpy()
        return told
