"""What the evaluator asks of each version: the same starts, which training does not see, with the most likely actions.

    PlayedEpisodes   whole episodes of N environments, equally many of each ─┐
    HeldOutStarts    grpo: an episode from each start behind those trained  ─┴─► return, length, episodes (success)

To count the episodes that end first would prefer short ones; so each environment's first E are counted. Where an
environment cannot be reset, what is left of the last version's episodes is played to its end first, and not counted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from actors.control.collector import Gatherer, check_outcome, restarts
from actors.control.environments.base import Environment
from actors.control.policy import Policy
from actors.evaluation.evaluator import Result
from async_rl.config import ControlConfig
from async_rl.data import Group, is_correct
from async_rl.protocol import Ticket

MAX_ENVS = 64
"""Environments at most that are played side by side."""
MAX_STEPS = 10_000
"""Where no limit of an episode is known, one is cut off after about so many steps, and counted as it stands."""


def split_episodes(episodes: int) -> tuple[int, int]:
    """How many environments play how many episodes each, at least ``episodes`` in all."""
    each = -(-episodes // MAX_ENVS)
    return -(-episodes // each), each


class PlayedEpisodes:
    """Whole episodes of the environment.

    Args:
        config: of the run.
        environment: N environments.
        policy: greedy.
        each: episodes E of each environment.
        seed: of their starts.
    """

    def __init__(self, config: ControlConfig, environment: Environment, policy: Policy, each: int, seed: int) -> None:
        self._id, self._environment, self._policy, self._each = config.env.id, environment, policy, each
        self._seed = seed
        self._longest = (environment.spaces.max_episode_steps or MAX_STEPS) + 1  # one more may only reset
        self._begun = False
        """Its episodes are under way, and cannot be begun anew."""

    @torch.inference_mode()
    def examine(self, between: Callable[[], None]) -> Result:
        """Play all of them; ``between`` is called between two steps.

        Raises:
            EnvironmentFault: an observation or a reward is not finite, or of a wrong shape.
        """
        environment, policy = self._environment, self._policy
        left_over = int(self._begun)
        self._begun = not environment.can_reset
        scores = _Scores(environment.num_envs, self._each, left_over)
        seen, resets = environment.reset(self._seed), None
        state = policy.initial_state(environment.num_envs)
        for _ in range((self._each + left_over) * self._longest):
            between()
            observations = {name: array.to(policy.device) for name, array in seen.items()}
            actions, _, state = policy.act(observations, state, None)
            step = environment.step(actions.to(environment.device))
            check_outcome(step, environment, self._id, "in the evaluation")
            scores.add(step.rewards, step.terminated | step.truncated, resets)
            if scores.complete:
                break
            state = policy.reset_state(state, restarts(step, resets).to(policy.device))
            seen, resets = step.observations, None if step.resets_next is None else step.resets_next.clone()
        return Result(scores.metrics())


class HeldOutStarts:
    """An episode from each of ``eval.episodes`` starts behind ``episodes.tasks``, scored as in training.

    Args:
        config: of the run.
        gatherer: plays groups of one episode, greedily.
    """

    def __init__(self, config: ControlConfig, gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self._tasks = range(config.episodes.tasks, config.episodes.tasks + config.eval.episodes)

    def examine(self, between: Callable[[], None]) -> Result:
        """Play all of them; ``between`` is called between two steps.

        Raises:
            EnvironmentFault: an observation or a reward is not finite, or of a wrong shape.
        """
        groups = [self._play(task, between) for task in self._tasks]
        scores = np.concatenate([group.rewards for group in groups])
        scored = scores[np.isfinite(scores)]
        metrics = {"length": float(np.mean([group.lengths for group in groups])), "episodes": len(scores)}
        if len(scored) < len(scores):
            metrics["unscored"] = len(scores) - len(scored)
        if len(scored):
            metrics |= {"return": float(scored.mean()), "return_std": float(scored.std())}
            if scored.min() >= 0 and scored.max() <= 1:
                metrics["success"] = float(is_correct(scored).mean())
        return Result(metrics)

    def _play(self, task: int, between: Callable[[], None]) -> Group:
        self._gatherer.begin(Ticket(ordinal=task, attempt=0, task_index=task, group_size=1, version=0, lease_s=0.0))
        while True:
            between()
            self._gatherer.step()
            group = self._gatherer.finished()
            if group is not None:
                return group


class _Scores:
    """Returns and lengths of the first E episodes of N environments, behind ``left_over`` that do not count."""

    def __init__(self, num_envs: int, each: int, left_over: int) -> None:
        self._each, self._envs = each + left_over, np.arange(num_envs)
        self._counted = slice(left_over, self._each)
        shape = (self._each + 1, num_envs)
        self._returns, self._lengths = np.zeros(shape), np.zeros(shape, np.int64)
        """[left_over + E + 1, N]; the last row takes what comes after."""
        self._episode = np.zeros(num_envs, np.int64)
        """[N]: which one each environment plays."""

    @property
    def complete(self) -> bool:
        """Whether every environment has played its E episodes."""
        return bool((self._episode == self._each).all())

    def add(self, rewards: torch.Tensor, ended: torch.Tensor, resets: torch.Tensor | None) -> None:
        """One step of all environments, [N] each; those in ``resets`` only began anew."""
        acted: npt.NDArray[np.bool_] | bool = True if resets is None else ~resets.cpu().numpy()
        self._returns[self._episode, self._envs] += rewards.cpu().numpy() * acted
        self._lengths[self._episode, self._envs] += acted
        self._episode = np.minimum(self._episode + ended.cpu().numpy(), self._each)

    def metrics(self) -> dict[str, float]:
        """Over all episodes that were played; those that were cut off count as they stand."""
        counted = self._counted if self._lengths[self._counted].any() else slice(0, self._each)
        played = self._lengths[counted] > 0
        returns, lengths = self._returns[counted][played], self._lengths[counted][played]
        return {
            "return": float(returns.mean()),
            "return_std": float(returns.std()),
            "length": float(lengths.mean()),
            "episodes": int(played.sum()),
        }
