"""Before the first update of a step: everything that belongs to the parameters at its start, over the whole batch.

    mini-batches ─► laid end to end, planned ─► forward, no gradient ─► rewards to advantages ─► normalised ─► updates
                                                old policy, critic,      make_signals            one small
                                                reference                                        all_reduce

Only what the configuration needs is forwarded; plain GRPO forwards nothing here and makes no collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from async_rl.config import Config
from learner.algorithms.whitening import moments, whiten
from learner.batching import (
    MicroBatch,
    Plan,
    build_micro_batches,
    count_micro_batches,
    make_filler,
    plan_micro_batches,
)
from learner.group import LearnerGroup
from learner.networks import Networks
from learner.parameters import Parameters
from learner.sequences import Sequences, concatenate
from learner.shard import MiniBatch
from learner.signals import Forwarded, Signals, make_signals


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """A mini-batch of this rank, ready for any number of updates."""

    sequences: Sequences
    signals: Signals
    plan: Plan | None
    num_micro_batches: int
    """The same on every rank."""
    num_tokens: int
    """Trained tokens over all ranks."""
    num_sequences: int
    """Sequences over all ranks."""

    def micro_batches(self, device: torch.device) -> Iterator[MicroBatch]:
        """Build them on ``device``."""
        return build_micro_batches(self.sequences, self.signals, self.plan, count=self.num_micro_batches, device=device)


class Preparer:
    """Makes the batches of a step ready.

    Args:
        config: algorithm and learner settings.
        networks: at the parameters of the step's start when :meth:`prepare` is called.
        group: the ranks.
        parameters: of the networks; its passes are made through it.
    """

    def __init__(self, config: Config, networks: Networks, group: LearnerGroup, parameters: Parameters) -> None:
        algorithm = config.algorithm
        self._config = config
        self._networks = networks
        self._group = group
        self._parameters = parameters
        self._old_logprobs = algorithm.proximal == "recomputed"
        self._reference = algorithm.advantage == "distill" or (algorithm.kl_coef > 0 and algorithm.kl_in == "reward")
        self._annotated = config.needs_reference and config.reference.placement == "scorer"
        self._normalised = algorithm.advantage in ("gae", "reinforce_pp")

    def prepare(self, mini_batches: Sequence[MiniBatch], version: int, kl_coef: float) -> list[PreparedBatch]:
        """Prepare this rank's part of a step; every rank makes the same collectives, whatever it got.

        Args:
            mini_batches: of this rank, in the order of their updates.
            version: weight version that is trained.
            kl_coef: β of this step.

        Raises:
            AsyncRLError: a group cannot be trained, see :func:`learner.sequences.concatenate`.
        """
        prepared = [self._prepare(batch, version, kl_coef) for batch in mini_batches]
        if not self._normalised:
            return prepared
        mine = sum((moments(batch.signals.advantages_M) for batch in prepared), torch.zeros(3, dtype=torch.float64))
        everyones = self._group.sum_over_ranks(mine)
        return [
            replace(batch, signals=replace(batch.signals, advantages_M=whiten(batch.signals.advantages_M, everyones)))
            for batch in prepared
        ]

    def _prepare(self, batch: MiniBatch, version: int, kl_coef: float) -> PreparedBatch:
        budget = self._config.learner.micro_batch_tokens
        sequences = concatenate(batch.groups, version, self._annotated)
        plan = plan_micro_batches(sequences, budget, self._networks.trees)
        count = max(count_micro_batches(lengths, budget) for lengths in batch.lengths_per_rank)
        if self._parameters.in_step:  # that is an upper bound; here each one that is empty would cost a pass
            count = self._group.max_over_ranks(len(plan.bounds) - 1 if plan else 0)
        forwarded = self._forward(sequences, plan, count)
        return PreparedBatch(
            sequences=sequences,
            signals=make_signals(self._config, sequences, forwarded, kl_coef),
            plan=plan,
            num_micro_batches=count,
            num_tokens=batch.num_tokens,
            num_sequences=batch.num_sequences,
        )

    def _forward(self, sequences: Sequences, plan: Plan | None, count: int) -> Forwarded:
        """One pass over the packed tokens for all that is needed; results in the order of the trained tokens."""
        networks, length = self._networks, len(sequences.token_M)
        old_M = torch.zeros(length) if self._old_logprobs else None
        values_M = torch.zeros(length) if networks.critic is not None else None
        forwards_reference = self._reference and networks.reference is not None
        reference_M = torch.zeros(length) if forwards_reference else None
        if sequences.ref_logprobs_M is not None:
            reference_M = torch.from_numpy(sequences.ref_logprobs_M)
        if self._old_logprobs or values_M is not None or forwards_reference:
            nothing = Signals(advantages_M=torch.zeros(length))
            for batch in build_micro_batches(sequences, nothing, plan, count=count, device=self._group.device):
                found = self._pass(batch, forwards_reference)
                for target, source in zip((old_M, values_M, reference_M), found, strict=True):
                    if target is not None and source is not None:
                        target[batch.index_M.cpu()] = source.cpu()
        return Forwarded(proximal_logprobs_M=old_M, ref_logprobs_M=reference_M, values_M=values_M)

    def _pass(self, batch: MicroBatch, reference: bool) -> tuple[torch.Tensor | None, ...]:
        """Log-probabilities of policy and reference, a critic's values between them, as far as wanted: ``[M]``."""
        networks, is_empty = self._networks, not len(batch.reads_M)
        if is_empty and not self._parameters.in_step:
            return None, None, None
        if is_empty:
            batch = make_filler(("advantages_M",), self._group.device)
        found = self._parameters.run(lambda: networks.logprobs_and_values(batch, self._old_logprobs))
        theirs = networks.reference.logprobs(batch) if reference and networks.reference else None
        return (None, None, None) if is_empty else (*found, theirs)
