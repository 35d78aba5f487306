"""One token per row through a decoder of Llama's shape: the model's own layers, without what decoding never needs.

    embed ─► [ norm ─ q, k, v ─ rotate ─ cache, attention by tiers ─ o ─ + ─ norm ─ mlp ─ + ] × layers ─► norm

At a few hundred rows of a small model transformers' forward takes as long around the arithmetic as in it. It reads
prompts, decodes all other models, and is what this one is held against before it is used.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from actors.engines.attention import attend
from actors.engines.kv_cache import KVCache
from actors.engines.linear import linear
from async_rl.models import last_hidden

_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""``model_type`` of the architectures whose layers are of this shape."""
_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""``rope_type`` of those whose angles depend on the position only, not on the length of the sequence."""
_PROBE = 12
"""Tokens of the sequence on which both forwards are compared."""
_TOLERANCE = 1e-4


class Decoder:
    """Decodes with the modules of a float32 model, whose weights may change between two calls.

    Args:
        model: for which :func:`decodes` is true.
    """

    def __init__(self, model: Any) -> None:
        self._model = model.base_model
        attention = self._model.layers[0].self_attn
        self._dim = attention.head_dim
        self._scale = attention.scaling
        self._table = torch.empty(2, 0, 1, self._dim)

    @torch.inference_mode()
    def agrees(self, cache: KVCache) -> bool:
        """Whether its hidden states are those of the model's own forward, on one sequence.

        Args:
            cache: an empty one, for this call only.
        """
        parameter = next(self._model.parameters())
        ids = torch.arange(1, _PROBE + 1, device=parameter.device)[None] % self._model.embed_tokens.num_embeddings
        expected = last_hidden(self._model, ids, use_cache=False)[0]
        worst = 0.0
        for position in range(_PROBE):
            at = np.array([position])
            cache.begin_decode(np.zeros(1, np.int64), at)
            found = self.forward(ids[0, position : position + 1], torch.from_numpy(at).to(ids.device), cache)
            difference = float((found[0] - expected[position]).abs().max())
            worst = max(worst, difference) if math.isfinite(difference) else math.inf
        return worst <= _TOLERANCE * max(1.0, float(expected.abs().max()))

    def forward(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Last hidden states [rows, hidden] of one new token per row.

        Args:
            tokens: [rows]
            positions: [rows]
            cache: whose step was begun; it may have fewer rows, the others are padding.
        """
        hidden = self._model.embed_tokens(tokens)
        cos, sin = self._rotation(hidden, cache.longest)[:, positions]
        for index, layer in enumerate(self._model.layers):
            hidden = hidden + self._attention(layer, _norm(layer.input_layernorm, hidden), index, cos, sin, cache)
            mlp, inputs = layer.mlp, _norm(layer.post_attention_layernorm, hidden)
            hidden += linear(mlp.down_proj, mlp.act_fn(linear(mlp.gate_proj, inputs)).mul_(linear(mlp.up_proj, inputs)))
        return _norm(self._model.norm, hidden)

    def _rotation(self, hidden: Tensor, longest: int) -> Tensor:
        """Cosines and sines of positions 0 to ``longest`` and maybe more: [2, positions, 1, head_dim]."""
        if self._table.shape[1] <= longest:
            positions = torch.arange(2 * longest + 1, device=hidden.device)
            cos, sin = (part[0] for part in self._model.rotary_emb(hidden, positions[None]))
            # (-x2, x1) sin = (x2, x1) (-sin, sin): one roll in place of a negation and two slices
            half = self._dim // 2
            self._table = torch.stack((cos, torch.cat((-sin[:, :half], sin[:, half:]), -1)))[:, :, None]
        return self._table

    def _attention(self, layer: Any, inputs: Tensor, index: int, cos: Tensor, sin: Tensor, cache: KVCache) -> Tensor:
        attention, rows = layer.self_attn, len(inputs)
        query, key, value = (
            linear(module, inputs).view(rows, -1, self._dim)
            for module in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            query, key = _norm(attention.q_norm, query), _norm(attention.k_norm, key)
        both = torch.cat((query, key), 1)
        both = torch.addcmul(both * cos, both.roll(self._dim // 2, -1), sin)
        heads = query.shape[1]
        cache.write(both[:, heads:], value, index)
        return linear(attention.o_proj, attend(both[:, :heads], cache, index, self._scale).view(rows, -1))


def decodes(model: Any) -> bool:
    """Whether to try a :class:`Decoder` with a model: float32, of a known shape, each head rotated as a whole."""
    base = model.base_model
    return (
        model.config.model_type in _TYPES
        and next(model.parameters()).dtype == torch.float32
        and base.rotary_emb.rope_type in _ROTATIONS
        and base.rotary_emb.inv_freq.numel() * 2 == base.layers[0].self_attn.head_dim
    )


def _norm(module: Any, inputs: Tensor) -> Tensor:
    return rms_norm(inputs, inputs.shape[-1:], module.weight, module.variance_epsilon)
