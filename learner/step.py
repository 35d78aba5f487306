"""One learner step on one rank: prepare, then epochs × mini-batches of updates; the synchronous script has it, too.

mini-batches ─► prepare ─► for each epoch, for each mini-batch: gradient ─► apply ─► StepStats ─► β of the next step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from async_rl.config import Config
from learner.prepare import PreparedBatch
from learner.scalars import Totals
from learner.shard import MiniBatch
from learner.step_stats import StepStats
from learner.updater import Updater


def train_step(
    config: Config,
    updater: Updater,
    mini_batches: Sequence[MiniBatch],
    step: int,
    check: Callable[[Totals, PreparedBatch, int], None] = lambda *_: None,
) -> StepStats:
    """Make all updates of ``step``, which trains version ``step``.

    Args:
        config: number of epochs.
        updater: the models.
        mini_batches: this rank's part.
        step: from 0.
        check: given the sums of the first update, its batch and ``step`` before it is applied: its policy is the very
            version that is trained.

    Returns:
        The sums of all updates.
    """
    stats = StepStats(config, updater.kl_coef)
    prepared = updater.prepare(mini_batches, step)
    for epoch in range(config.algorithm.epochs):
        for index, batch in enumerate(prepared):
            totals = updater.gradient(batch)
            on_version = epoch == 0 and index == 0
            if on_version:
                check(totals, batch, step)
            on_policy = on_version and bool(totals["age_histogram"][0] == totals["tokens"])
            stats.add(totals, updater.apply(totals, step, adapt=not on_policy))
    updater.adapt_kl(stats.reference_kl)
    return stats
