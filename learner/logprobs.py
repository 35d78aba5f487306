"""Log-probabilities of given tokens without ever holding the logits of all positions.

inputs [R, L] ─► base model ─► hidden [R·L, H] ─► rows that predict a trained token [N, H]
                                                      ▼
                                async_rl.logprobs: chunks ─► logprobs [N], entropy [N]
"""

from __future__ import annotations

from typing import Any

import torch

from async_rl.logprobs import token_logprobs
from async_rl.models import last_hidden


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
    # numbers to add, made once: kernels would make them of a bool mask again in every layer
    mask = torch.zeros((), dtype=model.dtype, device=visible_RLL.device).where(visible_RLL, -torch.inf)[:, None]
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
    hidden_NH = predicting_hidden(model, inputs_RL, source_N, positions_RL, visible_RLL)
    head = model.get_output_embeddings()
    return token_logprobs(hidden_NH, head.weight, head.bias, targets_N, temperature)


def predicting_hidden(
    model: Any,
    inputs_RL: torch.Tensor,
    source_N: torch.Tensor,
    positions_RL: torch.Tensor | None = None,
    visible_RLL: torch.Tensor | None = None,
) -> torch.Tensor:
    """Last hidden states ``[N, H]`` at the positions ``source_N`` of right-padded rows; arguments as above.

    A causal model never looks right, so padding there needs no attention mask; outputs at padding are not read.
    """
    return _hidden(model, inputs_RL, positions_RL, visible_RLL).flatten(0, 1).index_select(0, source_N)
