"""Prompts, then one token per row, through a decoder of Llama's shape: the model's own layers and nothing else.

    embed ─► [ norm ─ q, k, v ─ rotate ─ cache ─ attention ─ o ─ + ─ norm ─ mlp ─ + ] × layers ─► norm
                                                     │ of a prompt to itself, or of a new token to its row, by tiers

At a few hundred rows of a small model transformers' forward takes as long around the arithmetic as in it. That one
serves all other models, and is what this one is held against before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention

from actors.engines.attention import attend
from actors.engines.kv_cache import KVCache
from actors.engines.linear import linear, padded
from async_rl.models import last_hidden

_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""``model_type`` of the architectures whose layers are of this shape."""
_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""``rope_type`` of those whose angles depend on the position only, not on the length of the sequence."""
_PROBE = 12
"""Tokens of the sequences on which both forwards are compared."""
_PROBE_ROWS = 48
"""So many of them: more than the fewest rows for oneDNN, and a multiple of what it is given."""
_TOLERANCE = 1e-4


class Decoder:
    """Runs the modules of a float32 model, whose weights may change between two calls.

    Args:
        model: for which :func:`decodes` is true.
        onednn: whether its linear layers use oneDNN, and so want rows :func:`~actors.engines.linear.padded`.
    """

    def __init__(self, model: Any, *, onednn: bool) -> None:
        self._model, self._pads = model.base_model, onednn
        self._linear: Callable[[Any, Tensor], Tensor] = linear if onednn else _plain
        attention = self._model.layers[0].self_attn
        self._dim = attention.head_dim
        self._scale = attention.scaling
        self._table = torch.empty(2, 0, 1, self._dim)

    @torch.inference_mode()
    def agrees(self, cache: KVCache) -> bool:
        """Whether its hidden states of sequences, half read, half decoded, are those of the model's own forward.

        There are enough of them to take the same paths as at work.

        Args:
            cache: an empty one, for this call only.
        """
        vocabulary, device = self._model.embed_tokens.num_embeddings, next(self._model.parameters()).device
        ids = torch.arange(1, _PROBE * _PROBE_ROWS + 1, device=device).view(_PROBE_ROWS, _PROBE) % vocabulary
        expected = last_hidden(self._model, ids, use_cache=False)
        half, tier = _PROBE // 2, np.zeros(_PROBE_ROWS, np.int64)
        cache.begin_prefill(tier, np.arange(_PROBE_ROWS), half)
        found = [self.read(ids[:, :half], cache)]
        for position in range(half, _PROBE):
            at = np.full(_PROBE_ROWS, position)
            cache.begin_decode(tier, at)
            found.append(self.decode(ids[:, position], torch.from_numpy(at).to(device), cache)[:, None])
        difference = float((torch.cat(found, 1) - expected).abs().max())
        return difference <= _TOLERANCE * max(1.0, float(expected.abs().max()))  # not-a-number is no agreement

    def read(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Last hidden states [prompts, length, hidden] of whole prompts.

        Args:
            ids: [prompts, length], padded on the right.
            cache: told which rows they go to.
        """
        number = ids.numel()
        tokens = pad(ids.flatten(), (0, padded(number) - number)) if self._pads else ids.flatten()
        positions = torch.arange(len(tokens), device=ids.device) % ids.shape[1]
        hidden = self._forward(tokens, positions, ids.shape[1], cache, ids.shape)
        return hidden[:number].view(*ids.shape, -1)

    def decode(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Last hidden states [rows, hidden] of one new token per row.

        Args:
            tokens: [rows]
            positions: [rows]
            cache: whose step was begun; it may have fewer rows, the others are padding.
        """
        return self._forward(tokens, positions, cache.longest, cache, None)

    def _forward(
        self, tokens: Tensor, positions: Tensor, longest: int, cache: KVCache, prompts: tuple[int, ...] | None
    ) -> Tensor:
        hidden = self._model.embed_tokens(tokens)
        cos, sin = self._rotation(hidden, longest)[:, positions]
        for index, layer in enumerate(self._model.layers):
            inputs = _norm(layer.input_layernorm, hidden)
            hidden = hidden + self._attention(layer, inputs, index, cos, sin, cache, prompts)
            mlp, inputs = layer.mlp, _norm(layer.post_attention_layernorm, hidden)
            gate = mlp.act_fn(self._linear(mlp.gate_proj, inputs))
            hidden += self._linear(mlp.down_proj, gate.mul_(self._linear(mlp.up_proj, inputs)))
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

    def _attention(
        self,
        layer: Any,
        inputs: Tensor,
        index: int,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache,
        prompts: tuple[int, ...] | None,
    ) -> Tensor:
        attention, rows = layer.self_attn, len(inputs)
        query, key, value = (
            self._linear(module, inputs).view(rows, -1, self._dim)
            for module in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            query, key = _norm(attention.q_norm, query), _norm(attention.k_norm, key)
        both = torch.cat((query, key), 1)
        both = torch.addcmul(both * cos, both.roll(self._dim // 2, -1), sin)
        query, key = both[:, : query.shape[1]], both[:, query.shape[1] :]
        if prompts is None:
            cache.write(key, value, index)
            attended = attend(query, cache, index, self._scale)
        else:
            number = math.prod(prompts)
            q, k, v = (part[:number].unflatten(0, prompts).transpose(1, 2) for part in (query, key, value))
            k, v = cache.update(k, v, index)
            own = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=True)
            attended = pad(own.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, rows - number))
        return self._linear(attention.o_proj, attended.reshape(rows, -1))


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


def _plain(module: Any, inputs: Tensor) -> Tensor:
    return torch.nn.functional.linear(inputs, module.weight, module.bias)
