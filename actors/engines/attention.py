"""Attention of the torch engine: prompts as in transformers, decoding tier by tier of the KV cache.

    query [rows, heads, 1, dim] ──rows of a tier──► [rows, kv_heads, heads / kv_heads, dim] ──► its keys and values

The queries that share a KV head are taken as that many tokens of it: same numbers, and no keys are copied.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from actors.engines.kv_cache import KVCache, Part
from async_rl.errors import ConfigError

ATTENTION = "async_rl_tiers"
"""Name under which :func:`tiered_attention` is known to transformers."""


def tiered_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tiers: KVCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' sdpa; with ``tiers`` that of one new token per row to what the cache holds of it.

    Args:
        module: the layer's attention; has ``layer_idx``.
        query: [rows, heads, length, head_dim]; when decoding rows may be more than the cache has: padding.
        key: [rows, kv_heads, length, head_dim]; of length 0 when decoding.
        value: the same.
        attention_mask: of a prompt.
        dropout: 0.
        scaling: of the scores; None: 1 / sqrt(head_dim).
        tiers: the cache, when decoding.
        kwargs: passed on.

    Returns:
        [rows, length, heads, head_dim], and no weights.

    Raises:
        ConfigError: the model keeps the cache, or a bias of positions, from us.
    """
    if tiers is None:
        if not key.shape[2]:
            raise ConfigError(f"{type(module).__name__} does not hand its arguments on to attention: unsupported")
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return out, None
    if kwargs.get("position_bias") is not None:
        raise ConfigError(f"{type(module).__name__} adds a bias of positions to its scores: unsupported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query[:, :, 0], tiers, module.layer_idx, scale)[:, None], None


def attend(query: torch.Tensor, cache: KVCache, layer_idx: int, scale: float) -> torch.Tensor:
    """Attention of one new token per row to what the cache holds of the row, the token included.

    Args:
        query: [rows, heads, head_dim]; rows beyond those of the cache are padding.
        cache: whose step was begun, the new keys and values written.
        layer_idx: of the layer.
        scale: of the scores.

    Returns:
        [rows, heads, head_dim], contiguous.
    """
    rows, heads, dim = query.shape
    products = query.device.type == "cpu" and query.dtype == torch.float32
    kernel = _by_products if products else _by_sdpa
    outputs, end = [], 0
    for part in cache.parts:
        keys, values = cache.read(part, layer_idx)
        begin, end = end, end + part.num_rows
        folded = query[begin:end].reshape(part.num_rows, keys.shape[1], -1, dim)
        outputs.append(kernel(folded, keys, values, part, scale).reshape(part.num_rows, heads, dim))
    if rows > end:
        outputs.append(query.new_zeros(rows - end, heads, dim))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _by_products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: Part, scale: float
) -> torch.Tensor:
    """Two batched products: with so few queries per head faster than torch's kernel for the CPU."""
    bias, transposed = part.bias(keys.shape[1]), keys.flatten(0, 1).transpose(1, 2)
    scores = torch.baddbmm(bias, query.flatten(0, 1), transposed, alpha=scale)
    return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(*query.shape[:3], -1)


def _by_sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: Part, scale: float) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=part.seen[:, None, None], scale=scale
    )


AttentionInterface.register(ATTENTION, tiered_attention)
