"""A weighted sum of reward sources with the interface of one: every source is asked, all must answer.

    submit ─► each source's VerifierPool ─► verdicts ─► Σ weight · reward

A source that fails makes the sum fail, by its name.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.verifiers.child import Source
from actors.verifiers.pool import Verdict, VerifierPool
from async_rl.config import Config
from async_rl.sandbox import Sandbox

MODEL_START_S = 900.0
"""Limit of loading a reward model."""
_JUDGE_SHARE = 0.9
"""Part of the time limit after which a judge gives up by itself, so that it can say why."""


def make_reward_pool(config: Config, default_verifier: str, search: Path) -> VerifierPool | RewardPool:
    """Start the sources whose weight in ``[reward]`` is not 0; the verifier alone, at weight 1, is its plain pool.

    Args:
        config: sections ``reward``, ``task``, ``model`` decide.
        default_verifier: ``module:function``, of the task's data, which has the user's choice in it.
        search: folder that comes first in the search for the user's module: that of the configuration file.

    Raises:
        ConfigError: a source cannot start; says which setting is wrong.
    """
    wanted = {name: weight for name in _SOURCES if (weight := float(getattr(config.reward, name)))}

    def pool(name: str) -> VerifierPool:
        workers = 1 if name == "model" else config.task.verifiers  # one copy of its weights
        return VerifierPool(_SOURCES[name](config, default_verifier), config.task.timeout_s, workers, search)

    return pool("verifier") if wanted == {"verifier": 1.0} else _start(wanted, pool)


def _start(weights: Mapping[str, float], pool: Callable[[str], VerifierPool]) -> RewardPool:
    pools: dict[str, VerifierPool] = {}
    try:
        for name in weights:
            pools[name] = pool(name)
    except BaseException:
        for started in pools.values():
            started.close()
        raise
    return RewardPool(pools, weights)


def _verifier(config: Config, default_verifier: str) -> Source:
    return Source(function=default_verifier, sandbox=Sandbox.of(config.task))


def _reward_model(config: Config, default_verifier: str) -> Source:
    return Source(
        function="actors.rewards.reward_model:load",
        parameters={
            "folder": str(Path(config.reward.model_path).expanduser().resolve()),
            "device": config.model.device,
            "instruction": config.task.instruction,
            "chat": config.task.chat,
        },
        setting="reward.model_path",
        names_function=False,
        start_timeout_s=MODEL_START_S,
        sandbox=None,
    )


def _judge(config: Config, default_verifier: str) -> Source:
    return Source(
        function="actors.rewards.judge:connect",
        parameters={
            "url": config.reward.judge_url,
            "model": config.reward.judge_model,
            "template": config.reward.judge_prompt,
            "limit_s": _JUDGE_SHARE * config.task.timeout_s,
        },
        setting="reward.judge_url",
        names_function=False,
        sandbox=None,
    )


_SOURCES = {"verifier": _verifier, "model": _reward_model, "judge": _judge}
"""From a weight's name in ``[reward]`` to what its child processes call."""


class RewardPool:
    """Asks every source and gives the weighted sum; has the interface of :class:`actors.verifiers.pool.VerifierPool`.

    Args:
        pools: source by name.
        weights: weight by name, of the same names.
    """

    def __init__(self, pools: Mapping[str, VerifierPool], weights: Mapping[str, float]) -> None:
        self._pools, self._weights = dict(pools), dict(weights)
        self._open: dict[int, dict[str, Verdict]] = {}
        """The verdicts of each call, by source, as far as they are there."""

    @property
    def pending(self) -> int:
        """Calls whose verdict was not fetched yet."""
        return len(self._open)

    def submit(
        self, key: int, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> None:
        """Queue a call with every source; every list has one entry per completion."""
        self._open[key] = {}
        for pool in self._pools.values():
            pool.submit(key, prompts, completions, columns)

    def poll(self) -> list[Verdict]:
        """Verdicts that are there by now, without waiting."""
        for name, pool in self._pools.items():
            for verdict in pool.poll():
                self._open[verdict.key][name] = verdict
        done = [key for key, found in self._open.items() if len(found) == len(self._pools)]
        return [weighted_sum(key, self._open.pop(key), self._weights) for key in done]

    def wait(self, timeout_s: float) -> list[Verdict]:
        """Wait for the next verdicts; empty when nothing is pending or ``timeout_s`` has passed."""
        deadline = time.monotonic() + timeout_s
        while not (verdicts := self.poll()) and self.pending:
            now = time.monotonic()
            if now >= deadline:
                break
            poller = select.poll()
            for pool in self._pools.values():
                pool.watch(poller)
            due = self.next_deadline
            poller.poll(max(0.0, min(deadline, deadline if due is None else due) - now) * 1_000)
        return verdicts

    def filenos(self) -> list[int]:
        """Descriptors that become readable when ``poll`` has something to do; they change as children come and go."""
        return [descriptor for pool in self._pools.values() for descriptor in pool.filenos()]

    @property
    def next_deadline(self) -> float | None:
        """``time.monotonic()`` at which ``poll`` must be called at the latest, to kill a call that passes its limit."""
        due = [deadline for pool in self._pools.values() if (deadline := pool.next_deadline) is not None]
        return min(due, default=None)

    def close(self) -> None:
        """Kill all children; calls without a verdict get none."""
        for pool in self._pools.values():
            pool.close()
        self._open.clear()


def weighted_sum(key: int, verdicts: Mapping[str, Verdict], weights: Mapping[str, float]) -> Verdict:
    """One verdict of several: Σ weight · reward for each completion, or the first failure in the order of ``weights``.

    A NaN of a source (it cannot score that completion) is NaN in the sum.
    """
    for name in weights:
        verdict = verdicts[name]
        if verdict.rewards is None:
            return Verdict(key=key, rewards=None, outcome=verdict.outcome, detail=f"reward.{name}: {verdict.detail}")
    rows = [[weights[name] * reward for reward in verdicts[name].rewards or []] for name in weights]
    return Verdict(key=key, rewards=[sum(column) for column in zip(*rows, strict=True)], outcome="ok", detail="")
