"""Steps N environments with the policy and gathers fragments [T, N, ...] for the learner.

    ticket ─► begin ─► step × T ─► finished ─► Group        environments and hidden state go on over the borders

    one step:  obs[t] ─► policy.act ─► actions, logprobs, version [t] ─► environment ─► rewards, flags [t], obs[t + 1]

Weights may be swapped between two steps.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from actors.control.environments.base import Environment, Observations, Step
from actors.control.environments.outcome import what_does_not_fit, what_is_not_finite
from actors.control.policy import Policy, State
from actors.control.record import Record
from actors.control.tally import Running
from async_rl.config import ControlConfig
from async_rl.data import Group
from async_rl.errors import AsyncRLError
from async_rl.protocol import Ticket


class EnvironmentFault(AsyncRLError):
    """The environment gave numbers that are none, or arrays that are not those of its spaces: which, and where.

    Args:
        message: a sentence.
        reason: a short slug that the server counts.
    """

    def __init__(self, message: str, reason: str = "environment_not_finite") -> None:
        super().__init__(message)
        self.reason = reason


class Gatherer(Protocol):
    """What makes one group of one ticket, an environment step at a time."""

    def begin(self, ticket: Ticket) -> None:
        """Take up a ticket; there is none in hand."""

    def step(self) -> None:
        """One step of all environments with the policy as it is now.

        Raises:
            EnvironmentFault: the environment is broken. The ticket is out of hand; the next one begins anew.
        """

    def finished(self) -> Group | None:
        """The group, once, when its last step is made."""

    def drop(self) -> None:
        """Give up the ticket in hand."""


class Collector:
    """Gathers fragments; a :class:`Gatherer`.

    Args:
        config: ``env`` decides.
        environment: N environments.
        policy: holds a version whenever :meth:`step` is called.
        seed: of environments and actions.
    """

    def __init__(self, config: ControlConfig, environment: Environment, policy: Policy, seed: int) -> None:
        self._id, self._horizon = config.env.id, config.env.horizon
        self._environment, self._policy, self._seed = environment, policy, seed
        self._generator = torch.Generator(policy.device).manual_seed(seed)
        self._ticket: Ticket | None = None
        self._record: Record
        self._observations: Observations
        """What the policy sees next, by group [N, ...]."""
        self._state: State
        self._resets: torch.Tensor | None
        """bool [N]: environments that the next step only resets; None: this kind of environment has no such steps."""
        self._running: Running
        self._restart()

    @torch.inference_mode()
    def begin(self, ticket: Ticket) -> None:
        """Go on from where the environments stand, with new arrays."""
        self._ticket = ticket
        self._record = Record(self._environment, self._policy, self._horizon, self._state)
        self._record.see(0, self._observations)

    @torch.inference_mode()
    def step(self) -> None:
        """One step of all environments.

        Raises:
            EnvironmentFault: an observation or a reward is not finite, or of a wrong shape; the environments are reset.
        """
        record, policy, t = self._record, self._policy, self._record.num_steps
        seen = {name: array[t].to(policy.device) for name, array in record.observations.items()}
        actions, logprobs, state = policy.act(seen, self._state, self._generator)
        record.act(actions, logprobs, policy.version, self._resets)  # an environment may clip its actions in place
        step = self._environment.step(actions.to(self._environment.device))
        try:
            check_outcome(step, self._environment, self._id, f"after step {t} of a fragment")
        except EnvironmentFault:
            self._restart()
            raise
        record.take(step)
        self._observations = {name: array[t + 1] for name, array in record.observations.items()}
        if state:
            self._state = policy.reset_state(state, restarts(step, self._resets).to(policy.device))
        self._resets = None if step.resets_next is None else step.resets_next.clone()

    @torch.inference_mode()
    def finished(self) -> Group | None:
        """The fragment, once its T steps are made; one in which no action counted is gathered anew."""
        ticket = self._ticket
        if ticket is None or self._record.num_steps < self._horizon:
            return None
        if not self._record.has_acted:  # a horizon of 1, and all episodes have just ended: the next step counts
            self.drop()
            self.begin(ticket)
            return None
        finished, self._running = self._record.tally(self._running)
        arrays = self._record.arrays(finished)
        self._ticket = None
        return Group(
            ordinal=ticket.ordinal,
            attempt=ticket.attempt,
            task_index=ticket.task_index,
            lengths=(self._horizon,),
            arrays=arrays,
            rewards=np.asarray([arrays["step_rewards"].mean(dtype=np.float64)], np.float32),
        )

    @torch.inference_mode()
    def drop(self) -> None:
        """Give up the ticket's steps; the environments stay where they are."""
        if self._ticket is not None:
            _, self._running = self._record.tally(self._running)
            self._ticket = None

    @torch.inference_mode()
    def _restart(self) -> None:
        """Every environment anew, each time with other seeds."""
        self._ticket = None
        self._observations = self._environment.reset(self._seed)
        self._seed += 1
        self._state = self._policy.initial_state(self._environment.num_envs)
        self._resets = None
        self._running = Running.none(self._environment.num_envs)


def check_outcome(step: Step, environment: Environment, env_id: str, when: str) -> None:
    """Refuse a step whose arrays are not those of the spaces, or hold numbers that are none.

    Args:
        step: its outcome.
        environment: that made it.
        env_id: its name, for the message.
        when: end of the sentence.

    Raises:
        EnvironmentFault: says which array.
    """
    misfit = what_does_not_fit(step, environment)
    fault = misfit or what_is_not_finite(step)
    if fault:
        reason = "environment_wrong_shape" if misfit else "environment_not_finite"
        raise EnvironmentFault(f"environment {env_id}: {fault}, {when}", reason)


def restarts(step: Step, resets: torch.Tensor | None) -> torch.Tensor:
    """Which environments [N] begin an episode with the next step: this one was an end, or only reset them.

    The learner's ``resets`` follow the same rule.
    """
    ended = step.terminated | step.truncated
    return ended if resets is None else ended | resets
