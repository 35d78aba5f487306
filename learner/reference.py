"""The frozen model of the KL terms, or the teacher: scores the tokens that are trained, without gradient."""

from __future__ import annotations

from typing import Any

import torch

from learner.batching import MicroBatch
from learner.logprobs import can_forward_trees, predicted_logprobs
from learner.parking import Parkable


class Reference:
    """A causal language model whose parameters never change.

    Args:
        model: on the learner's device; it is frozen and put into evaluation mode.
        temperature: of the sampling contract; both sides of the KL are at this temperature.
    """

    def __init__(self, model: Any, temperature: float) -> None:
        self._model = model.eval().requires_grad_(False)
        self._temperature = temperature
        self._parkables = [Parkable(parameter.data, constant=True) for parameter in model.parameters()]
        self.trees = can_forward_trees(model)
        """Whether it can forward rows of trees."""

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities of the trained tokens, float32 ``[M]``."""
        with torch.no_grad():
            logprobs_N, _ = predicted_logprobs(
                self._model,
                batch.inputs_RL,
                batch.source_N,
                batch.targets_N,
                self._temperature,
                batch.positions_RL,
                batch.visible_RLL,
            )
        return logprobs_N[batch.reads_M]

    def compile(self) -> None:
        """Compile its layers, see :meth:`learner.networks.Networks.compile`."""
        self._model.base_model.compile(dynamic=True)

    def offload(self) -> None:
        """Give the device memory back."""
        for parkable in self._parkables:
            parkable.offload()

    def restore(self) -> None:
        """Take it again."""
        for parkable in self._parkables:
            parkable.restore()
