"""The KV cache of the torch engine: one row per distinct token prefix, rows packed from 0, all layers in one tensor.

    store [layers, 2, rows, length, kv_heads, head_dim]
             prefill: rows a..b, positions 0..T are written        decode: one position per row is written,
             and attention stays inside the prompt                 attention reads rows 0..n, positions 0..attended

Samples of one prompt share its row until they draw different tokens; then the row is copied (:func:`plan_rows`).
Storage grows with the longest sequence and the most rows seen, never with the model's context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from async_rl.errors import ConfigError

ATTENTION = "async_rl_grouped"
"""Name under which :func:`grouped_attention` is known to transformers."""
_STEP = 16
"""Rows and positions are allocated in multiples of this."""

Ints = npt.NDArray[np.int64]


class KVCache(Cache):
    """Keys and values of all rows; the engine says before each forward what the forward does.

    Args:
        layers, kv_heads, head_dim: the model's shape.
        dtype, device: of the stored tensors.
    """

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layers=[])
        # zeros, not empty: masked positions have weight 0, and 0 times a stray NaN would still be NaN
        self._store = torch.zeros((layers, 2, 0, 0, kv_heads, head_dim), dtype=dtype, device=device)
        self._prefill: slice | None = None
        self._rows = torch.empty(0, dtype=torch.int64, device=device)
        self._positions = self._rows
        self._attended = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return int(self._store.numel() * self._store.element_size())

    def reserve(self, rows: int, length: int) -> None:
        """Make room for ``rows`` rows of ``length`` positions; what is stored stays."""
        old = self._store
        have_rows, have_length = old.shape[2:4]
        if rows <= have_rows and length <= have_length:
            return
        rows = have_rows if rows <= have_rows else max(_round_up(rows), have_rows * 3 // 2)
        length = have_length if length <= have_length else max(_round_up(length), have_length * 3 // 2)
        self._store = torch.zeros((*old.shape[:2], rows, length, *old.shape[4:]), dtype=old.dtype, device=old.device)
        self._store[:, :, :have_rows, :have_length] = old

    def free(self) -> None:
        """Give the memory back; no row is in use."""
        self._store = self._store[:, :, :0, :0].clone()

    def begin_prefill(self, first_row: int, num_rows: int) -> None:
        """Say that the next forward reads whole prompts [num_rows, length] into rows from ``first_row``."""
        self._prefill = slice(first_row, first_row + num_rows)

    def begin_decode(self, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """Say that the next forward reads one token per row, at ``positions`` [num_rows], the largest ``longest``.

        Returns:
            The attention mask, bool [num_rows, 1, 1, attended].
        """
        self._prefill, self._positions = None, positions
        num_rows = len(positions)
        if len(self._rows) != num_rows:
            self._rows = torch.arange(num_rows, device=positions.device)
        self._attended = min(-(-(longest + 1) // 8) * 8, self._store.shape[3])
        seen = torch.arange(self._attended, device=positions.device) <= positions[:, None]
        return seen[:, None, None, :]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values [rows, kv_heads, new, head_dim]; return those to attend to."""
        keys, values = self._store[layer_idx]
        if key_states.shape[1::2] != keys.shape[2:]:
            raise ConfigError(f"layer {layer_idx} has KV {tuple(key_states.shape[1::2])}, not {tuple(keys.shape[2:])}")
        if self._prefill is not None:
            length = key_states.shape[2]
            keys[self._prefill, :length] = key_states.transpose(1, 2)
            values[self._prefill, :length] = value_states.transpose(1, 2)
            return key_states, value_states
        keys[self._rows, self._positions] = key_states[:, :, 0]
        values[self._rows, self._positions] = value_states[:, :, 0]
        read = slice(0, len(self._rows)), slice(0, self._attended)
        return keys[read].transpose(1, 2), values[read].transpose(1, 2)

    def copy_rows(self, source: Ints, target: Ints, length: int) -> None:
        """Copy the first ``length`` positions of rows ``source`` to rows ``target``; the two are disjoint."""
        if len(source):
            self.reserve(int(target.max()) + 1, length)
            index = torch.from_numpy(np.stack([source, target])).to(self._store.device)
            self._store[:, :, index[1], :length] = self._store[:, :, index[0], :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before a prefill: none, a prompt is read at once; decoding passes its positions and mask."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys of a prefill."""
        return query_length, 0


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which row each sample is on next, and which rows must be copied first. Rows are packed from 0."""

    row: Ints
    """[num_samples] next row of each sample."""
    parent: Ints
    """[num_rows] the row that each next row continues."""
    token: Ints
    """[num_rows] the token that it continues with."""
    source: Ints
    """[num_copies] rows to copy ..."""
    target: Ints
    """[num_copies] ... to these, which nothing continues."""


def plan_rows(rows: Ints, tokens: Ints) -> RowPlan:
    """Give one row to each distinct (row, token); the first child of a row stays on it where that keeps rows packed.

    Args:
        rows: [num_samples] current row of each sample that goes on.
        tokens: [num_samples] the token that it drew, not negative.
    """
    base = int(tokens.max()) + 1 if len(tokens) else 1
    children, row_of = np.unique(rows * base + tokens, return_inverse=True)
    num_rows = len(children)
    parent, token = children // base, children % base
    stays = np.ones(num_rows, bool)
    stays[1:] = parent[1:] != parent[:-1]
    stays &= parent < num_rows
    hole = np.ones(num_rows, bool)
    hole[parent[stays]] = False
    place = np.empty(num_rows, np.int64)
    place[stays] = parent[stays]
    place[~stays] = target = np.flatnonzero(hole)
    order = np.argsort(place)
    return RowPlan(place[row_of], parent[order], token[order], parent[~stays], target)


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' sdpa; one-token queries of a KV head are folded into its query axis.

    With grouped-query attention sdpa would first copy keys and values for each query head. Folded, the ``heads //
    kv_heads`` queries of a KV head attend as if they were that many tokens: same numbers, no copy.
    """
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    if length > 1 or heads == kv_heads or kwargs.get("position_bias") is not None:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return out, None
    folded = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    out = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return out.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, grouped_attention)


def _round_up(size: int) -> int:
    return -(-size // _STEP) * _STEP
