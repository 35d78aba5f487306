"""The frozen model of the KL terms, or the teacher: scores the tokens that are trained, without gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from learner.batching import MicroBatch
from learner.logprobs import can_forward_trees, predicted_logprobs
from learner.parking import Parkable

if TYPE_CHECKING:
    from learner.group import LearnerGroup


class ReferenceModel(Protocol):
    """What the learner compares its policy with: a model of its own, or the policy without its adapter."""

    trees: bool
    """Whether it can forward rows of trees."""

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities of the trained tokens, float32 ``[M]``."""

    def compile(self) -> None:
        """Compile its layers, see :meth:`learner.networks.Networks.compile`."""

    def offload(self) -> None:
        """Give the device memory back."""

    def restore(self) -> None:
        """Take it again."""


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
        self._run: Callable[[Callable[[], torch.Tensor]], torch.Tensor] = lambda work: work()

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities of the trained tokens, float32 ``[M]``."""
        return self._run(lambda: trained_logprobs(self._model, batch, self._temperature))

    def shard(self, group: LearnerGroup) -> None:
        """Leave each rank a shard of it; from now on all of them call :meth:`logprobs` equally often."""
        from learner.fsdp import run, shard

        self._parkables.clear()  # they would keep it whole
        root = shard({"reference": self._model}, group, self._model.dtype)
        self._run = partial(run, root, group)

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


@torch.no_grad()
def trained_logprobs(model: Any, batch: MicroBatch, temperature: float) -> torch.Tensor:
    """Log-probabilities of the trained tokens by a model, float32 ``[M]``, without gradient."""
    logprobs_N, _ = predicted_logprobs(
        model,
        batch.inputs_RL,
        batch.source_N,
        batch.targets_N,
        temperature,
        batch.positions_RL,
        batch.visible_RLL,
    )
    return logprobs_N[batch.reads_M]
