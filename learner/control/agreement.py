"""Whether actors and learner give the same log-probability to actions that exactly these weights chose.

log-probabilities at the step's start ─► difference_sums ─► sum over ranks ─► Agreement.judge ─► metrics │ error
"""

from __future__ import annotations

import sys

import torch

from async_rl.errors import AsyncRLError
from async_rl.metrics import Metrics
from learner.control.rollout import Rollout

LIMIT = 1e-3
"""Mean |log-probability difference| between actor and learner, same weights; rounding leaves 1e-6 or so."""


def difference_sums(rollout: Rollout, logprobs: torch.Tensor, step: int) -> torch.Tensor:
    """Σ |difference| and count of the fresh steps (chosen by version ``step``), then of the older ones, [4].

    A step of a recurrent policy is fresh if all steps before it in the fragment are: others have hidden states that
    older weights made.

    Args:
        rollout: of this rank.
        logprobs: [T, N], at the parameters of version ``step``.
        step: version that is trained.
    """
    current = rollout.versions == step
    fresh = current & rollout.acted
    if rollout.states:
        fresh &= (current | ~rollout.acted).cumprod(0).bool()
    older = rollout.acted & (rollout.versions < step)
    difference = (logprobs - rollout.logprobs).abs()
    return torch.stack([(difference * fresh).sum(), fresh.sum(), (difference * older).sum(), older.sum()]).double()


class Agreement:
    """Watches the difference over the steps of a run.

    Args:
        warns: whether this rank prints the warning.
    """

    def __init__(self, warns: bool) -> None:
        self._warns = warns
        self._passed = False

    def judge(self, sums: torch.Tensor, step: int) -> Metrics:
        """Look at the sums of :func:`difference_sums` over all ranks, so that all decide alike.

        Returns:
            ``logp_diff/fresh`` and ``logp_diff/older``, the means; None where there are no such steps.

        Raises:
            AsyncRLError: the first fresh steps of this session have other log-probabilities here. Later on, when
                deviations of the policy may have become tiny, that is one warning.
        """
        fresh, num_fresh, older, num_older = sums.tolist()
        difference = fresh / num_fresh if num_fresh else None
        if difference is not None:
            if not difference <= LIMIT:
                self._complain(difference, int(num_fresh), step)
            self._passed = True
        return {"logp_diff/fresh": difference, "logp_diff/older": older / num_older if num_older else None}

    def _complain(self, difference: float, count: int, step: int) -> None:
        said = (
            f"actor and learner disagree about the same weights (version {step}): mean |log-probability difference| "
            f"{difference:.3g} over {count} steps, limit {LIMIT:g}"
        )
        if not self._passed:
            raise AsyncRLError(
                f"{said}; the actor's environment, observation groups or package version differ from here"
            )
        if self._warns:
            self._warns = False
            print(f"async-rl: warning: step {step}: {said}", file=sys.stderr, flush=True)
