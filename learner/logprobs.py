"""Log-probabilities of given tokens without ever holding the logits of all positions.

inputs [R, L] ─► base model ─► hidden [R·L, H] ─► rows that predict a trained token [N, H]
                                                      │ chunks of at most 2^24 logits
                                                      ▼
                                           head ─► log-softmax ─► logprobs [N], entropy [N]
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from async_rl.models import last_hidden

MAX_LOGITS = 1 << 24


def can_forward_trees(model: Any) -> bool:
    """Whether the model's attention takes any mask, so that several continuations can stand beside each other in a row.

    Asked of its configuration, then tried: two continuations of a prefix in one row must come out as in two rows.
    """
    config = model.config
    full = all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if config._attn_implementation != "sdpa" or not full or window:
        return False
    device = next(model.parameters()).device
    ids = torch.arange(4, device=device) % int(config.vocab_size)
    positions = torch.tensor([[0, 1, 2, 2]], device=device)
    visible = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]], device=device).bool()
    with torch.no_grad():
        tree = _hidden(model, ids[None], positions, visible[None])[0, 2:]
        rows = _hidden(model, ids[torch.tensor([[0, 1, 2], [0, 1, 3]], device=device)], None, None)[:, 2]
    noise = 1e-4 if tree.dtype == torch.float32 else 5e-2
    return bool((tree - rows).abs().max() <= noise * rows.abs().max())


def _hidden(
    model: Any, inputs_RL: torch.Tensor, positions_RL: torch.Tensor | None, visible_RLL: torch.Tensor | None
) -> torch.Tensor:
    """Last hidden states ``[R, L, H]``; without a mask each column sees itself and those before it."""
    if visible_RLL is None:
        return last_hidden(model, inputs_RL, use_cache=False)
    mask = visible_RLL[:, None]
    return last_hidden(model, inputs_RL, attention_mask=mask, position_ids=positions_RL, use_cache=False)


def predicted_logprobs(
    model: Any,
    inputs_RL: torch.Tensor,
    source_N: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float,
    positions_RL: torch.Tensor | None = None,
    visible_RLL: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies at some positions of right-padded rows.

    A causal model never looks right, so padding there needs no attention mask; outputs at padding are not read.

    Args:
        model: a Hugging Face causal language model whose logits are its output embedding of the last hidden state.
        inputs_RL: int64 ``[R, L]`` token ids.
        source_N: int64 ``[N]``, positions (flattened over ``R·L``) whose output predicts the targets.
        targets_N: int64 ``[N]``, the predicted tokens.
        temperature: of the distribution that was sampled.
        positions_RL: int64 ``[R, L]``, for rows of trees (:mod:`learner.layout`).
        visible_RLL: bool ``[R, L, L]``, for rows of trees.

    Returns:
        float32 ``[N]`` log-probabilities with gradient, float32 ``[N]`` entropies without.
    """
    hidden_RLH = _hidden(model, inputs_RL, positions_RL, visible_RLL)
    head = model.get_output_embeddings()
    hidden_NH = hidden_RLH.flatten(0, 1).index_select(0, source_N)
    return token_logprobs(hidden_NH, head.weight, head.bias, targets_N, temperature)


def token_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    temperature: float,
    max_logits: int = MAX_LOGITS,
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

    Returns:
        float32 ``[N]`` with gradient, float32 ``[N]`` without.
    """
    rows = max(1, max_logits // weight_VH.shape[0])
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
    with torch.no_grad():
        mean_logit_N = ((logits_NV - normaliser_N[:, None]).exp() * logits_NV).sum(-1)
        entropy_N = normaliser_N - mean_logit_N
    return logprobs_N, entropy_N
