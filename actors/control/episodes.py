"""Plays groups of whole episodes from the same start, for ``grpo``.

    ticket ─► reset_alike(seed of the task) ─► step until all have ended ─► judge ─► Group of G trajectories

    one step:  observations of those that go on ─► policy ─► actions, log-probabilities per part, version

Weights may be swapped between two steps: each part of an action carries the version that chose it. An episode that has
ended waits for the others; its environment is stepped along and what it says is ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from actors.control.collector import EnvironmentFault, check_outcome
from actors.control.environments.base import Environment, Observations, Step
from actors.control.environments.seeds import process_seed
from actors.control.judges import make_judge
from actors.control.policy import Policy
from async_rl.config import ControlConfig
from async_rl.control.fragment import FINAL_OBS, OBS
from async_rl.data import Array, Group
from async_rl.errors import ConfigError
from async_rl.protocol import Ticket


def start_seed(seed: int, task_index: int) -> int:
    """Seed of an initial state: the same in all actors of a run, for every attempt."""
    return int.from_bytes(hashlib.sha256(f"start {seed} {task_index}".encode()).digest()[:4], "little") >> 1


class EpisodeCollector:
    """Plays groups of episodes; a :class:`~actors.control.collector.Gatherer`.

    Args:
        config: ``episodes`` decides, ``seed`` is of starts and actions.
        environment: G of them.
        policy: not recurrent; holds a version whenever :meth:`step` is called.

    Raises:
        ConfigError: another number of environments than episodes of a group, or nothing can judge them.
    """

    def __init__(self, config: ControlConfig, environment: Environment, policy: Policy) -> None:
        if environment.num_envs != config.group_size:
            raise ConfigError(
                f"a group has episodes.group_size = {config.group_size} episodes, and there are {environment.num_envs} "
                "environments: make as many"
            )
        self._id, self._seed, self._max_steps = config.env.id, config.seed, config.episodes.max_steps
        self._environment, self._policy = environment, policy
        self._judge = make_judge(config.episodes.reward)
        self._generator = torch.Generator(policy.device)
        self._ticket: Ticket | None = None

    @torch.inference_mode()
    def begin(self, ticket: Ticket) -> None:
        """Start all episodes in the state of the ticket's task; a ticket that was lost is played again as it was."""
        self._ticket = ticket
        self._generator.manual_seed(process_seed(self._seed, f"ordinal {ticket.ordinal}", ticket.draw))
        observations = self._environment.reset_alike(start_seed(self._seed, ticket.task_index))
        self._played = _Played(self._environment, self._policy.action.kind == "continuous", observations)

    @torch.inference_mode()
    def step(self) -> None:
        """One step of the episodes that go on.

        Raises:
            EnvironmentFault: an observation or a reward is not finite, or of a wrong shape.
        """
        played, policy = self._played, self._policy
        rows = played.alive.nonzero().squeeze(1)
        seen = {name: array[rows].to(policy.device) for name, array in played.now.items()}
        distribution, _ = policy.distribution(seen, ())
        actions = distribution.mode() if policy.greedy else distribution.sample(self._generator)
        played.act(rows, actions, distribution.log_prob_parts(actions), policy.version)
        step = self._environment.step(played.actions[-1].clone())  # an environment may clip its actions in place
        try:
            check_outcome(step, self._environment, self._id, f"after step {len(played.actions)} of the episodes")
        except EnvironmentFault:
            self._ticket = None
            raise
        played.take(step)

    @torch.inference_mode()
    def finished(self) -> Group | None:
        """The group, once all episodes have ended or reached ``episodes.max_steps``.

        Raises:
            AsyncRLError: the judge failed.
        """
        ticket = self._ticket
        if ticket is None:
            return None
        played = self._played
        if len(played.actions) < self._max_steps and bool(played.alive.any()):
            return None
        self._ticket = None
        lengths = played.lengths()
        arrays = played.arrays(lengths)
        rewards = self._judge(played.episodes(arrays, lengths))
        del arrays["rewards"]
        return Group(
            ordinal=ticket.ordinal,
            attempt=ticket.attempt,
            task_index=ticket.task_index,
            lengths=tuple(int(n) for n in lengths),
            arrays=arrays,
            rewards=rewards,
        )

    def drop(self) -> None:
        """Give up the ticket in hand."""
        self._ticket = None


class _Played:
    """What has happened in G episodes since their start; arrays are kept on the environment's device."""

    def __init__(self, environment: Environment, continuous: bool, first: Observations) -> None:
        self._size = environment.num_envs
        self._device = environment.device
        self._dtype = torch.float32 if continuous else torch.int32
        self.alive = torch.ones(self._size, dtype=torch.bool, device=self._device)
        """bool [G]: the episode goes on."""
        self.now: Mapping[str, torch.Tensor] = {name: array.clone() for name, array in first.items()}
        """What the episodes see next; of one that has ended, what followed its last step."""
        self._observations: list[Mapping[str, torch.Tensor]] = []
        self._acted: list[torch.Tensor] = []
        self.actions: list[torch.Tensor] = []
        """[G, A] each, 0 of episodes that had ended."""
        self._logprobs: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._rewards: list[torch.Tensor] = []
        self._terminated = torch.zeros_like(self.alive)
        self._truncated = torch.zeros_like(self.alive)

    def act(self, rows: torch.Tensor, actions: torch.Tensor, logprobs: torch.Tensor, version: int) -> None:
        """What the policy chose: actions and log-probabilities [K, A] of the rows [K] that go on."""
        self._observations.append(self.now)
        self._acted.append(self.alive)
        shape = (self._size, actions.shape[1])
        whole = torch.zeros(shape, dtype=self._dtype, device=self._device)
        whole[rows] = actions.to(self._device, self._dtype)
        self.actions.append(whole)
        whole = torch.zeros(shape, device=self._device)
        whole[rows] = logprobs.to(self._device)
        self._logprobs.append(whole)
        self._versions.append(version)

    def take(self, step: Step) -> None:
        """What came of it."""
        acted = self.alive
        self._rewards.append(step.rewards * acted)
        self._terminated = self._terminated | (acted & step.terminated)
        self._truncated = self._truncated | (acted & step.truncated)
        ends = acted & (step.terminated | step.truncated)
        # Where an ending step has reset its environment at once, what it returns belongs to the next episode.
        shown = acted & ~ends if step.resets_next is None else acted
        self.now = {name: _where(shown, step.observations[name], before) for name, before in self.now.items()}
        told = step.final_observations
        if step.resets_next is None and told is not None:
            for name, array in self.now.items():
                array[step.truncated & acted] = told[name][acted[step.truncated]]
        self.alive = acted & ~ends

    def lengths(self) -> npt.NDArray[np.int64]:
        """Steps [G] of each episode."""
        return np.asarray(torch.stack(self._acted).sum(0).cpu().numpy())

    def arrays(self, lengths: npt.NDArray[np.int64]) -> dict[str, Array]:
        """Episode behind episode, see :mod:`async_rl.control.fragment`; and the environment's ``rewards`` [S]."""
        acted = torch.stack(self._acted).T  # [G, T], so that rows are taken in the order of the episodes

        def in_order(steps: list[torch.Tensor]) -> Array:
            return np.asarray(torch.stack(steps, 1)[acted].cpu().numpy())

        rewards, actions = in_order(self._rewards), in_order(self.actions)
        starts = np.cumsum(lengths) - lengths
        versions = np.array(self._versions, np.int32)[acted.nonzero()[:, 1].cpu().numpy()]
        return {
            **{OBS + name: in_order([seen[name] for seen in self._observations]) for name in self.now},
            "actions": actions,
            "logprobs": in_order(self._logprobs),
            "versions": versions[:, None].repeat(actions.shape[1], 1),
            "rewards": rewards,
            "episode_returns": np.add.reduceat(rewards, starts, dtype=np.float64).astype(np.float32),
            "episode_lengths": lengths.astype(np.int32),
        }

    def episodes(self, arrays: Mapping[str, Array], lengths: npt.NDArray[np.int64]) -> list[dict[str, Array]]:
        """What a judge sees of each, see :mod:`actors.control.judges`."""
        final = {FINAL_OBS + name: array.cpu().numpy() for name, array in self.now.items()}
        final |= {"terminated": self._terminated.cpu().numpy(), "truncated": self._truncated.cpu().numpy()}
        stops = np.cumsum(lengths)
        steps = {n: a for n, a in arrays.items() if n.startswith(OBS) or n in ("actions", "rewards")}
        return [
            {name: array[stop - length : stop] for name, array in steps.items()}
            | {name: array[episode] for name, array in final.items()}
            for episode, (stop, length) in enumerate(zip(stops, lengths, strict=True))
        ]


def _where(mask: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """``new`` where ``mask`` [G], else ``old``, both [G, ...]."""
    return torch.where(mask.view(-1, *[1] * (new.ndim - 1)), new, old)
