"""The probe's arbiter: log-probabilities by the plain ``transformers`` forward, full logits in float32, any version.

tokens ─► model(version) ─► logits [L, V] ─► log_softmax(logits / T) ─► at the sampled tokens, and what they would be
                                                                        under each known fault

It shares nothing with engine and learner but the model's class, so the side that agrees with it is right.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from async_rl.probe import changed
from learner.probe.diagnose import SHIFT, TEMPERATURE, Floats, shifted


class Arbiter:
    """A model that can take the weights of any version of the probe.

    Args:
        model: with the start weights, version 0.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._start = {name: p.detach().clone() for name, p in model.named_parameters()}
        self._device = next(model.parameters()).device

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._start)

    def take(self, version: int) -> None:
        """Give the model the weights of a version."""
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(changed(self._start[name], name, version))

    def take_one(self, name: str, version: int) -> None:
        """Give one tensor another version than the rest."""
        self.model.get_parameter(name).data.copy_(changed(self._start[name], name, version))

    def logits(self, tokens_L: npt.NDArray[np.int64]) -> torch.Tensor:
        """float32 ``[L, V]`` of one sequence."""
        with torch.no_grad():
            ids = torch.as_tensor(tokens_L, device=self._device)[None]
            return self.model(input_ids=ids, use_cache=False).logits[0].float()

    def prefill(self, tokens_L: npt.NDArray[np.int64]) -> tuple[torch.Tensor, Any]:
        """Logits of one sequence, float32 ``[L, V]``, and the keys and values of its inputs."""
        with torch.no_grad():
            ids = torch.as_tensor(tokens_L, device=self._device)[None]
            done = self.model(input_ids=ids, use_cache=True)
        return done.logits[0].float(), done.past_key_values

    def go_on(self, tokens_L: npt.NDArray[np.int64], cache: Any, num_old: int) -> torch.Tensor:
        """Logits of the inputs after the first ``num_old``, whose keys and values are taken from another version.

        Args:
            tokens_L: one sequence.
            cache: of all its inputs, by :meth:`prefill` of that version; left as it is.
            num_old: fewer than L.
        """
        kept = copy.deepcopy(cache)
        kept.crop(num_old - len(tokens_L))  # negative: so many are taken away
        with torch.no_grad():
            ids = torch.as_tensor(tokens_L[num_old:], device=self._device)[None]
            return self.model(input_ids=ids, past_key_values=kept, use_cache=True).logits[0].float()


def at_tokens(logits_LV: torch.Tensor, tokens_L: Sequence[int], num_prompt: int, T: float, by: int = 0) -> Floats:
    """Log-probability of each sampled token, read ``by`` positions beside the right one; NaN where there is none.

    Args:
        logits_LV: of one sequence.
        tokens_L: the sequence.
        num_prompt: its tokens that were not sampled.
        T: temperature.
        by: 0 is right: position ``t - 1`` predicts token ``t``.
    """
    source_N = np.arange(num_prompt - 1, len(tokens_L) - 1) + by
    there_N = (source_N >= 0) & (source_N < len(tokens_L))
    rows = torch.as_tensor(source_N[there_N], device=logits_LV.device)
    targets = torch.as_tensor(np.asarray(tokens_L)[num_prompt:][there_N], device=logits_LV.device)
    logprobs_N = np.full(len(source_N), np.nan)
    logprobs_N[there_N] = (logits_LV[rows] / T).log_softmax(-1).gather(-1, targets[:, None])[:, 0].cpu().numpy()
    return logprobs_N


def with_faults(
    logits_LV: torch.Tensor, tokens_L: Sequence[int], num_prompt: int, T: float
) -> tuple[Floats, dict[str, list[Floats]]]:
    """What a sequence's log-probabilities are, and what they would be under each known fault, in each of its forms."""
    right_N = at_tokens(logits_LV, tokens_L, num_prompt, T)
    one = np.zeros(len(right_N), np.int64)
    shifts = [shifted(right_N, one, by) for by in (-1, 1)]
    shifts += [at_tokens(logits_LV, tokens_L, num_prompt, T, by) for by in (-1, 1)]
    at_1 = [] if T == 1 else [at_tokens(logits_LV, tokens_L, num_prompt, 1.0)]
    return right_N, {TEMPERATURE: at_1, SHIFT: shifts}
