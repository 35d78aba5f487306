"""The numbers of one step: adds up the sums of its updates, and turns them into the metrics that people read."""

from __future__ import annotations

import torch

from learner.algorithms.grpo import ratio_percentile
from learner.scalars import Totals
from learner.updater import Applied

NOISE_FLOOR = 0.05
"""Mean |log-probability difference| of tokens of the current version above which float32 runs are warned."""


class StepStats:
    """Sums over the updates of a step, the same on every rank."""

    def __init__(self) -> None:
        self._sums: Totals = {}
        self._fresh: Totals = {}
        self._applied: list[Applied] = []

    def add(self, totals: Totals, applied: Applied) -> None:
        """Take in one update; the first of a step is the one whose policy is exactly the version that is trained."""
        if not self._applied:
            self._fresh = totals
        self._applied.append(applied)
        self._sums = {name: self._sums.get(name, 0) + total for name, total in totals.items()}

    def metrics(self, epochs: int) -> dict[str, float]:
        """The step in numbers; ``epochs`` passes over the same groups count each sequence once."""
        sums, updates = self._sums, len(self._applied)
        tokens = max(1.0, float(sums["tokens"]))
        scored = max(1.0, float(sums["scored"]))
        reward = float(sums["reward"]) / scored
        ages = sums["age_histogram"]
        return {
            "reward/mean": reward,
            "reward/std": max(0.0, float(sums["reward_squared"]) / scored - reward**2) ** 0.5,
            "accuracy": float(sums["correct"]) / scored,
            "length/mean": tokens / max(1.0, float(sums["sequences"])),
            "age/mean": float((ages * torch.arange(len(ages))).sum()) / tokens,
            "age/max": float(ages.nonzero().max()) if ages.any() else 0.0,
            "tokens/step": float(sums["tokens"]) / epochs,
            "loss/policy": float(sums["loss_policy"]) / updates,
            "loss/kl": float(sums["loss_kl"]) / updates,
            "entropy": float(sums["entropy"]) / tokens,
            "kl/behaviour": float(sums["kl_k3"]) / tokens,
            "kl/behaviour_k1": float(sums["kl_k1"]) / tokens,
            "ratio/mean": float(sums["ratio"]) / tokens,
            "ratio/p01": ratio_percentile(sums["ratio_histogram"], 0.01),
            "ratio/p50": ratio_percentile(sums["ratio_histogram"], 0.50),
            "ratio/p99": ratio_percentile(sums["ratio_histogram"], 0.99),
            "ess": effective_sample_size(sums),
            "clip_fraction": float(sums["clipped"]) / tokens,
            "logp_diff/age0": difference_age0(self._fresh),
            "logp_diff/older": difference_older(self._fresh),
            "grad_norm": self._applied[-1].grad_norm,
            "lr": self._applied[-1].lr,
            "updates_skipped": float(sum(a.skipped for a in self._applied)),
        }


def effective_sample_size(sums: Totals) -> float:
    """Share of the tokens that the importance weights leave effective: ``(Σ r)² / (n Σ r²)``; 1 on policy."""
    denominator = float(sums["tokens"] * sums["ratio_squared"])
    return float(sums["ratio"]) ** 2 / denominator if denominator > 0 else 1.0


def difference_age0(totals: Totals) -> float:
    """Mean |log-probability of actor − of learner| of tokens that the trained version itself sampled; 0 without any."""
    count = float(totals["tokens_age0"])
    return float(totals["difference_age0"]) / count if count else 0.0


def difference_older(totals: Totals) -> float:
    """The same of tokens that older versions sampled: how far the policy has moved since."""
    count = float(totals["tokens"] - totals["tokens_age0"])
    return float(totals["difference_older"]) / count if count else 0.0
