"""The numbers of one step: adds up the sums of its updates, and turns them into the metrics that people read.

A metric that has nothing to be measured on (log-probability differences of an age that no token has, the critic of a
run without one) is None: no number would be true.
"""

from __future__ import annotations

import torch

from async_rl.config import Config
from async_rl.metrics import Metrics
from learner.algorithms.off_policy import effective_sample_size, ratio_percentile
from learner.scalars import Totals
from learner.updater import Applied

_PERCENTILES = {"p01": 0.01, "p50": 0.50, "p99": 0.99}
_HISTOGRAMS = {
    "ratio": "ratio_histogram",
    "ratio_seq": "sequence_ratio_histogram",
    "ratio_seq_mean": "sequence_mean_histogram",
}


class StepStats:
    """Sums over the updates of a step, the same on every rank.

    Args:
        config: the run; its epochs are passes over the same groups, which count each sequence once.
        kl_coef: β of the step.
    """

    def __init__(self, config: Config, kl_coef: float = 0.0) -> None:
        self._epochs = config.algorithm.epochs
        self._has_reference = config.needs_reference
        self._kl_coef = kl_coef
        self._sums: Totals = {}
        self._fresh: Totals = {}
        self._applied: list[Applied] = []

    def add(self, totals: Totals, applied: Applied) -> None:
        """Take in one update; the first of a step is the one whose policy is exactly the version that is trained."""
        if not self._applied:
            self._fresh = totals
        self._applied.append(applied)
        self._sums = {name: self._sums.get(name, 0) + total for name, total in totals.items()}

    @property
    def tokens(self) -> float:
        """Trained tokens of the step over all ranks, each counted once."""
        return float(self._sums["tokens"]) / self._epochs

    @property
    def reference_kl(self) -> float | None:
        """Measured KL to the reference per token (k3); None without a reference."""
        return _ratio(self._sums["kl_ref"], self._sums["tokens"]) if self._has_reference else None

    def metrics(self) -> Metrics:
        """The step in numbers."""
        sums = self._sums
        tokens, sequences = max(1.0, float(sums["tokens"])), max(1.0, float(sums["sequences"]))
        return (
            self._rewards()
            | self._losses()
            | {
                "length/mean": float(sums["tokens"]) / sequences,
                "tokens/step": self.tokens,
                "entropy": float(sums["entropy"]) / tokens,
                "kl/behaviour": float(sums["kl_k3"]) / tokens,
                "kl/behaviour_k1": float(sums["kl_k1"]) / tokens,
                "kl/reference": self.reference_kl,
                "kl_coef": self._kl_coef,
                "ratio/mean": float(sums["ratio"]) / tokens,
                "ess": effective_sample_size(sums, "ratio"),
                "ess_weights": effective_sample_size(sums, "weight"),
                "masked_fraction": float(sums["masked"]) / tokens,
                "clip_fraction": float(sums["clipped"]) / tokens,
                "grad_norm": self._applied[-1].grad_norm,
                "lr": self._applied[-1].lr,
                "updates_skipped": float(sum(a.skipped for a in self._applied)),
            }
            | {
                f"{name}/{label}": ratio_percentile(sums[histogram], fraction)
                for name, histogram in _HISTOGRAMS.items()
                for label, fraction in _PERCENTILES.items()
            }
            | self._ages()
        )

    def _rewards(self) -> Metrics:
        sums = self._sums
        tokens, scored = max(1.0, float(sums["tokens"])), max(1.0, float(sums["scored"]))
        reward, advantage = float(sums["reward"]) / scored, float(sums["advantage"]) / tokens
        return {
            "reward/mean": reward,
            "reward/std": max(0.0, float(sums["reward_squared"]) / scored - reward**2) ** 0.5,
            "accuracy": float(sums["correct"]) / scored,
            "advantage/mean": advantage,
            "advantage/std": max(0.0, float(sums["advantage_squared"]) / tokens - advantage**2) ** 0.5,
        }

    def _losses(self) -> Metrics:
        sums, updates, critic = self._sums, len(self._applied), float(self._sums["value_tokens"]) > 0
        return {
            "loss/policy": float(sums["loss_policy"]) / updates,
            "loss/kl": float(sums["loss_kl"]) / updates,
            "loss/value": float(sums["loss_value"]) / updates if critic else None,
            "value/explained_variance": explained_variance(sums) if critic else None,
            "value/clip_fraction": _ratio(sums["value_clipped"], sums["value_tokens"]),
        }

    def _ages(self) -> Metrics:
        counts = self._sums["age_histogram"]
        differences = mean_differences(self._fresh)
        older = slice(1, None)
        return {
            "age/mean": float((counts * torch.arange(len(counts))).sum()) / max(1.0, float(counts.sum())),
            "age/max": float(counts.nonzero().max()) if counts.any() else 0.0,
            # the last bin is beyond the bound, and empty unless there is as good as none
            **{f"logp_diff/age{age}": value for age, value in enumerate(differences[:-1])},
            "logp_diff/fresh": fresh_difference(self._fresh),
            "logp_diff/older": _ratio(
                self._fresh["age_difference"][older].sum(), self._fresh["age_histogram"][older].sum()
            ),
        }


def mean_differences(totals: Totals) -> list[float | None]:
    """Mean |log-probability of actor − of learner| of the tokens of each age; None where there are none.

    Above age 0 it is how far the policy has moved. At age 0 it is rounding, and what old KV of the tokens before
    changes with ``actors.kv_cache = "keep"``.
    """
    return [_ratio(d, c) for d, c in zip(totals["age_difference"], totals["age_histogram"], strict=True)]


def fresh_difference(totals: Totals) -> float | None:
    """The same over sequences that the trained version has sampled alone: nothing but rounding; None without any."""
    return _ratio(totals["fresh_difference"], totals["fresh"])


def explained_variance(totals: Totals) -> float | None:
    """Share of the returns' variance that the critic predicts, ``1 - Σ(V - R)² / Σ(R - mean)²``; None without any."""
    count = float(totals["value_tokens"])
    spread = float(totals["returns_squared"]) - float(totals["returns"]) ** 2 / count
    return 1.0 - float(totals["value_error"]) / spread if spread > 1e-6 * count else None


def _ratio(total: torch.Tensor, count: torch.Tensor) -> float | None:
    return float(total) / float(count) if float(count) else None
