"""Log-probabilities of given tokens from the last hidden states, without ever holding the logits of all positions.

    hidden [N, H] ─► chunks of at most 2^24 logits ─► head ─► log-softmax ─► logprobs [N], entropy [N]

The learner's policy and reference, and the reference in a process of its own, use this one.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
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
        entropy_gradient: whether the entropy has a gradient; it costs as much memory as the logits.

    Returns:
        float32 ``[N]`` with gradient, float32 ``[N]`` with or without.
    """
    rows = max(1, max_logits // weight_VH.shape[0])
    if len(hidden_NH) <= rows:
        return _project(hidden_NH, weight_VH, bias_V, targets_N, temperature, entropy_gradient)
    project = partial(checkpoint, _project, use_reentrant=False, preserve_rng_state=False)
    chunks = zip(hidden_NH.split(rows), targets_N.split(rows), strict=True)
    parts = [project(hidden, weight_VH, bias_V, targets, temperature, entropy_gradient) for hidden, targets in chunks]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _project(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_NV = F.linear(hidden_NH, weight_VH, bias_V).float() / temperature
    normaliser_N = logits_NV.logsumexp(-1)
    logprobs_N = logits_NV.gather(-1, targets_N[:, None]).squeeze(-1) - normaliser_N
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        mean_logit_N = ((logits_NV - normaliser_N[:, None]).exp() * logits_NV).sum(-1)
        entropy_N = normaliser_N - mean_logit_N
    return logprobs_N, entropy_N
