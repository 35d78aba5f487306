"""Whether actors and learner give the same log-probability to tokens that exactly these weights sampled.

first update of a step ─► mean |difference| of fresh sequences ─┬─ there are none ─► wait for a later step
                                                                ├─ first one, above the limit ─► the run ends
                                                                └─ later, above the noise ─► one warning

A sequence is fresh if the trained version alone has sampled it:
others may have been decoded on the KV of older weights.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from async_rl.config import Config
from async_rl.errors import AsyncRLError
from learner.logprobs import predicted_logprobs
from learner.networks import Networks
from learner.prepare import PreparedBatch
from learner.probe.diagnose import explain
from learner.scalars import Totals
from learner.step_stats import fresh_difference

LIMITS = {"float32": 1e-2, "bfloat16": 0.5}
"""Mean |log-probability difference| between actor and learner, same weights, above which the run does not start."""
NOISE_FLOOR = 0.05
"""The same, above which float32 runs are warned later on."""


class MismatchCheck:
    """Watches the difference over the steps of a run.

    Args:
        config: the run.
        networks: at the parameters of the step's start when :meth:`check` is called.
        device: of the networks.
        warns: whether this rank prints the warning.
    """

    def __init__(self, config: Config, networks: Networks, device: torch.device, warns: bool) -> None:
        self._config = config
        self._networks = networks
        self._device = device
        self._warns = warns and config.model.dtype == "float32"
        self._mock = config.actors.engine == "mock"  # its log-probabilities are made up
        self._passed = False

    def check(self, totals: Totals, batch: PreparedBatch, version: int) -> None:
        """Look at the first update of a step.

        Args:
            totals: its sums over all ranks, so that all decide alike.
            batch: this rank's part of it.
            version: that is trained.

        Raises:
            AsyncRLError: the first tokens of a trained version in this session have other log-probabilities here.
        """
        difference = fresh_difference(totals)
        if difference is None or self._mock:
            return
        if not self._passed:
            self._judge(difference, int(totals["fresh"]), batch, version)
            self._passed = True
        if self._warns and difference > NOISE_FLOOR:
            self._warns = False
            print(
                f"async-rl: warning: step {version}: log-probabilities of the current version differ by "
                f"{difference:.3g} on average between actor and learner, who must agree up to rounding; see "
                "`async-rl doctor CONFIG`",
                file=sys.stderr,
                flush=True,
            )

    def _judge(self, difference: float, count: int, batch: PreparedBatch, version: int) -> None:
        dtype = self._config.model.dtype
        limit = LIMITS[dtype]
        if difference <= limit:
            return
        raise AsyncRLError(
            f"actor and learner disagree about the same weights (version {version}): mean |log-probability "
            f"difference| {difference:.3g} over {count} tokens, limit {limit} for {dtype}; {self._cause(batch, limit)}"
        )

    def _cause(self, batch: PreparedBatch, limit: float) -> str:
        """What this rank's own fresh sequences tell."""
        if self._config.sharded:  # ranks would make different numbers of passes
            return "`async-rl doctor CONFIG` says why"
        temperature, sequences = self._config.sampling.temperature, batch.sequences
        oldest_S = np.zeros(len(sequences.trained_S), np.int64)
        np.maximum.at(oldest_S, sequences.sequence_M, sequences.ages_M)
        fresh_M = oldest_S[sequences.sequence_M] == 0
        if not fresh_M.any():
            return "this rank has none of these tokens, another one has: see its log"
        here, at_1 = (self._logprobs(batch, t)[fresh_M] for t in (temperature, 1.0))
        cause = explain(
            sequences.behaviour_logprobs_M[fresh_M],
            here,
            sequences.sequence_M[fresh_M],
            temperature=temperature,
            limit=limit,
            learner_at_1_N=at_1,
        )
        return cause or "this rank's own tokens agree, those of another rank do not: see its log"

    @torch.no_grad()
    def _logprobs(self, batch: PreparedBatch, temperature: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        found_M = torch.zeros(len(batch.sequences.token_M))
        for part in batch.micro_batches(self._device):
            if len(part.reads_M):
                logprobs_N, _ = predicted_logprobs(
                    self._networks.policy,
                    part.inputs_RL,
                    part.source_N,
                    part.targets_N,
                    temperature,
                    part.positions_RL,
                    part.visible_RLL,
                )
                found_M[part.index_M.cpu()] = logprobs_N[part.reads_M].cpu()
        return found_M.numpy()
