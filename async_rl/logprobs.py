"""Log-probabilities of given tokens from the last hidden states, without ever holding the logits of all positions.

    hidden [N, H] ─► chunks of at most 2^24 logits ─► head ─► log-softmax ─► logprobs [N], entropy [N]

The learner's policy and reference, and the reference in a process of its own, use this one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 1 << 24


def token_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    temperature: float,
    max_logits: int = MAX_LOGITS,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``log softmax((hidden @ weight.T + bias) / temperature)[target]`` and entropy, in float32, chunk by chunk.

    With more than one chunk the logits of a chunk are computed again in the backward pass instead of being kept.

    Args:
        hidden_NH: hidden states ``[N, H]``.
        weight_VH: output embedding ``[V, H]``.
        bias_V: its bias ``[V]`` or None.
        targets_N: int64 ``[N]``.
        temperature: divides the logits.
        max_logits: most logits that one chunk holds.
        entropy_gradient: whether the entropy has a gradient; it costs as much memory as the logits, and time.

    Returns:
        float32 ``[N]`` with gradient, float32 ``[N]`` with or without.
    """
    rows = max(1, max_logits // weight_VH.shape[0])
    if not entropy_gradient:
        logprobs_N, entropy_N = _TokenLogprobs.apply(hidden_NH, weight_VH, bias_V, targets_N, temperature, rows)
        return logprobs_N, entropy_N
    if len(hidden_NH) <= rows:
        return _project(hidden_NH, weight_VH, bias_V, targets_N, temperature)
    project = partial(checkpoint, _project, use_reentrant=False, preserve_rng_state=False)
    chunks = zip(hidden_NH.split(rows), targets_N.split(rows), strict=True)
    parts = [project(hidden, weight_VH, bias_V, targets, temperature) for hidden, targets in chunks]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _project(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_NV = F.linear(hidden_NH, weight_VH, bias_V).float() / temperature
    normaliser_N = logits_NV.logsumexp(-1)
    logprobs_N = logits_NV.gather(-1, targets_N[:, None]).squeeze(-1) - normaliser_N
    mean_logit_N = ((logits_NV - normaliser_N[:, None]).exp() * logits_NV).sum(-1)
    return logprobs_N, normaliser_N - mean_logit_N


class _TokenLogprobs(torch.autograd.Function):
    """The same with its gradient written out: autograd passes over the logits about three times as often.

    log p_t = z_t - log Σ_v exp(z_v)      z = (h Wᵀ + b) / T
    ∂/∂z_v = [v = t] - p_v                so, with g_n = (gradient of log p_n) / T:

    ∂h = g · (W[t] - p W)      ∂W = scatter_t(g · h) - pᵀ (g · h)      ∂b = scatter_t(g) - pᵀ g
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperature: float,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = _Head(weight_VH, bias_V, temperature, min(rows, len(hidden_NH)))
        normaliser_N = hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32)
        logprobs_N, entropy_N = torch.empty_like(normaliser_N), torch.empty_like(normaliser_N)
        scratch_CV = torch.empty_like(head.buffer_CV)
        probabilities_NV = None
        for first in range(0, len(hidden_NH), rows):
            chunk = slice(first, first + rows)
            logits_CV = head.logits(hidden_NH[chunk])
            highest_C = logits_CV.amax(-1)
            chosen_C = logits_CV.gather(-1, targets_N[chunk, None]).squeeze(-1)
            weights_CV = torch.sub(logits_CV, highest_C[:, None], out=scratch_CV[: len(logits_CV)]).exp_()
            total_C = weights_CV.sum(-1)
            mean_logit_C = torch.bmm(weights_CV[:, None], logits_CV[:, :, None]).view(-1) / total_C
            normaliser_N[chunk] = highest_C + total_C.log()
            logprobs_N[chunk] = chosen_C - normaliser_N[chunk]
            entropy_N[chunk] = normaliser_N[chunk] - mean_logit_C
            if len(hidden_NH) <= rows and any(ctx.needs_input_grad[:3]):
                probabilities_NV = weights_CV.div_(total_C[:, None])
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, normaliser_N, probabilities_NV)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.mark_non_differentiable(entropy_N)
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, gradient_N: torch.Tensor | None, _: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None, None]:
        hidden_NH, weight_VH, bias_V, targets_N, normaliser_N, probabilities_NV = ctx.saved_tensors
        if gradient_N is None:
            return (None,) * 6
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype, rows = weight_VH.dtype, ctx.rows
        if probabilities_NV is None:
            head = _Head(weight_VH, bias_V, ctx.temperature, min(rows, len(hidden_NH)))
        by_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        by_weight_VH = torch.zeros_like(weight_VH) if needs_weight else None
        by_bias_V = torch.zeros_like(bias_V) if needs_bias else None
        for first in range(0, len(hidden_NH), rows):
            chunk = slice(first, first + rows)
            probabilities_CV = probabilities_NV
            if probabilities_CV is None:
                probabilities_CV = head.logits(hidden_NH[chunk]).sub_(normaliser_N[chunk, None]).exp_()
            probabilities_CV, targets_C = probabilities_CV.to(dtype), targets_N[chunk]
            gradient_C1 = (gradient_N[chunk, None] / ctx.temperature).to(dtype)
            if by_hidden_NH is not None:
                towards_CH = weight_VH[targets_C] - probabilities_CV @ weight_VH
                by_hidden_NH[chunk] = gradient_C1 * towards_CH
            if by_weight_VH is not None:
                scaled_CH = gradient_C1 * hidden_NH[chunk]
                by_weight_VH.addmm_(probabilities_CV.t(), scaled_CH, alpha=-1).index_add_(0, targets_C, scaled_CH)
            if by_bias_V is not None:
                by_bias_V.addmv_(probabilities_CV.t(), gradient_C1[:, 0], alpha=-1)
                by_bias_V.index_add_(0, targets_C, gradient_C1[:, 0])
        return by_hidden_NH, by_weight_VH, by_bias_V, None, None, None


class _Head:
    """Logits of one chunk after another in the same memory: fresh pages for each would cost about as much as a pass."""

    def __init__(self, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, temperature: float, rows: int) -> None:
        self._weight_VH = weight_VH
        self._bias_V = bias_V
        self._temperature = temperature
        self.buffer_CV = weight_VH.new_empty((rows, weight_VH.shape[0]), dtype=torch.float32)

    def logits(self, hidden_CH: torch.Tensor) -> torch.Tensor:
        """float32 ``[C, V]``, valid until the next call."""
        logits_CV = self.buffer_CV[: len(hidden_CH)]
        if hidden_CH.dtype == torch.float32:
            torch.mm(hidden_CH, self._weight_VH.t(), out=logits_CV)
            if self._bias_V is not None:
                logits_CV += self._bias_V
        else:
            logits_CV.copy_(F.linear(hidden_CH, self._weight_VH, self._bias_V))
        return logits_CV if self._temperature == 1 else logits_CV.div_(self._temperature)
