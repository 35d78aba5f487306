"""The KV cache of the torch engine: one row per distinct token prefix, rows of like length together in a tier.

    tier 0 [layers, 2, rows, kv_heads,  32, head_dim]    prefill: whole prompts are written, attention stays inside
    tier 1 [layers, 2, rows, kv_heads,  64, head_dim]    decode: one position per row is written, and each tier is
    ...                                                  attended to by itself, as far as its longest row reaches

A few long sequences among many short ones so cost what they are long, in memory and in time. All is allocated once and
grows with the rows seen, never with the model's context. Which row is where: :mod:`actors.engines.rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache

from actors.engines.rows import Copy, Ints
from async_rl.errors import ConfigError

_ROWS, _POSITIONS = 16, 8
"""Rows are allocated, and positions attended to, in multiples of this."""
_SHORTEST = 32
"""Positions of the first tier."""
_LONGEST = 1 << 24


@dataclass(slots=True)
class Part:
    """The rows of one tier in a decode step."""

    tier: int
    num_rows: int
    seen: torch.Tensor
    """bool [num_rows, attended]: which positions a row attends to."""
    index: torch.Tensor
    """[num_rows * kv_heads] where the new keys lie among all positions of the tier."""
    _bias: torch.Tensor | None = None

    def bias(self, kv_heads: int) -> torch.Tensor:
        """float32 [num_rows * kv_heads, 1, attended]: 0 where seen, else minus infinity."""
        if self._bias is None:
            bias = torch.zeros(self.seen.shape, device=self.seen.device).masked_fill_(~self.seen, -torch.inf)
            self._bias = bias.repeat_interleave(kv_heads, 0)[:, None]
        return self._bias


class KVCache(Cache):
    """Keys and values of all rows; the engine says before each forward what the forward does.

    Args:
        layers, kv_heads, head_dim: the model's shape.
        dtype, device: of the stored tensors.
        tiers: whether the model's attention is :func:`~actors.engines.attention.tiered_attention`; else all rows are
            in one tier, as long as the longest of them.
    """

    def __init__(
        self, *, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, tiers: bool
    ) -> None:
        super().__init__(layers=[])
        self._shape = layers, kv_heads, head_dim
        self._dtype, self._device = dtype, device
        self._lengths = _tier_lengths(device.type == "cpu") if tiers else np.array([_LONGEST])
        self._tiers = tiers
        self._stores: dict[int, torch.Tensor] = {}
        self._prefill: Sequence[tuple[int, torch.Tensor, torch.Tensor, int]] | None = None
        self._counted = torch.arange(_SHORTEST, device=device)
        self._most_rows = 0
        self.parts: list[Part] = []
        """Of the decode step that was begun last."""
        self.longest = 0
        """Largest position in it."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(store.numel() * store.element_size() for store in self._stores.values())

    def tier_for(self, length: Ints) -> Ints:
        """The tier of rows that hold ``length`` positions."""
        return np.searchsorted(self._lengths, length)

    def free(self) -> None:
        """Give the memory back; no row is in use."""
        self._stores.clear()
        self._most_rows = 0
        self.parts = []

    def begin_prefill(self, tier: Ints, place: Ints, length: int) -> None:
        """Say that the next forward reads whole prompts [num_rows, length], padded on the right, into these rows."""
        writes = []
        for number in np.unique(tier).tolist():
            at = np.flatnonzero(tier == number)
            # a tier holds its prompts whole; what is cut of a longer batch is padding
            kept = min(length, int(self._lengths[number]))
            self._reserve(number, int(place[at].max()) + 1, kept)
            index = torch.from_numpy(np.stack([at, place[at]])).to(self._device)
            writes.append((number, index[0], index[1], kept))
        self._prefill = writes

    def begin_decode(self, tier: Ints, length: Ints) -> torch.Tensor:
        """Say that the next forward reads one token per row.

        Args:
            tier: [num_rows] of each row, not decreasing; the rows of a tier are at its places from 0 on.
            length: [num_rows] positions that each row holds, which is the position of its new one.

        Returns:
            What to give to the model as attention mask.
        """
        self._prefill = None
        heads = self._shape[1]
        numbers, first, counts = np.unique(tier, return_index=True, return_counts=True)
        longest = np.maximum.reduceat(length, first)
        spans = list(zip(numbers.tolist(), first.tolist(), counts.tolist(), longest.tolist(), strict=True))
        capacity = [self._reserve(number, count, most + 1) for number, _, count, most in spans]
        place = np.arange(len(tier)) - np.repeat(first, counts)
        index = (place[:, None] * heads + np.arange(heads)) * np.repeat(capacity, counts)[:, None] + length[:, None]
        host = torch.from_numpy(np.concatenate([length, index.ravel()])).to(self._device)
        positions, index_device = host[: len(tier)], host[len(tier) :]
        self.parts, self.longest = [], int(longest.max())
        for number, start, count, most in spans:
            attended = -(-(most + 1) // _POSITIONS) * _POSITIONS
            seen = self._range(attended) <= positions[start : start + count, None]
            self.parts.append(Part(number, count, seen, index_device[start * heads : (start + count) * heads]))
        return self.parts[0].seen[:, None, None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values [rows, kv_heads, new, head_dim]; return those to attend to.

        With tiers and while decoding these are none: attention asks :meth:`read`.
        """
        if key_states.shape[1::2] != self._shape[1:]:
            raise ConfigError(f"layer {layer_idx} has KV {tuple(key_states.shape[1::2])}, not {self._shape[1:]}")
        if self._prefill is not None:
            for tier, source, place, length in self._prefill:
                keys, values = self._stores[tier][layer_idx]
                keys[place, :, :length] = key_states[source, :, :length]
                values[place, :, :length] = value_states[source, :, :length]
            return key_states, value_states
        self.write(key_states[:, :, 0], value_states[:, :, 0], layer_idx)
        none = key_states[:, :, :0], value_states[:, :, :0]
        return none if self._tiers else self.read(self.parts[0], layer_idx)

    def write(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> None:
        """Store new keys and values [rows, kv_heads, head_dim] of a decode step; rows beyond its own are padding."""
        end, dim = 0, keys.shape[-1]
        for part in self.parts:
            begin, end = end, end + part.num_rows
            for kind, new in enumerate((keys, values)):
                held = self._stores[part.tier][layer_idx, kind].view(-1, dim)
                held.index_copy_(0, part.index, new[begin:end].reshape(-1, dim))

    def read(self, part: Part, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [num_rows, kv_heads, attended, head_dim] of a tier's rows."""
        keys, values = self._stores[part.tier][layer_idx, :, : part.num_rows, :, : part.seen.shape[1]]
        return keys, values

    def copy(self, copies: Sequence[Copy], length: int) -> None:
        """Carry out the copies of a plan, as far as the first ``length`` positions."""
        for copy in copies:
            kept = min(length, int(self._lengths[copy.source_tier]))
            self._reserve(copy.target_tier, int(copy.target.max()) + 1, kept)
            index = torch.from_numpy(np.stack([copy.source, copy.target])).to(self._device)
            source, target = self._stores[copy.source_tier], self._stores[copy.target_tier]
            target[:, :, index[1], :, :kept] = source[:, :, :, :, :kept].index_select(2, index[0])

    def trim(self, tier: Ints) -> None:
        """Free tiers without rows once twice the memory is taken that the same rows would take in one padded tensor.

        Args:
            tier: [num_rows] of each row in use.
        """
        self._most_rows = max(self._most_rows, len(tier))
        taken = sum(store.shape[2] * store.shape[4] for store in self._stores.values())
        if len(tier) and taken > 2 * _round_up(self._most_rows) * int(self._lengths[tier.max()]):
            for number in self._stores.keys() - set(tier.tolist()):
                del self._stores[number]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before a prefill: none, a prompt is read at once; decoding passes its positions and mask."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys of a prefill."""
        return query_length, 0

    def _range(self, length: int) -> torch.Tensor:
        if len(self._counted) < length:
            self._counted = torch.arange(2 * length, device=self._device)
        return self._counted[:length]

    def _reserve(self, tier: int, rows: int, length: int) -> int:
        """Make room in a tier; what is stored stays. Only without tiers its length grows. Returns its length."""
        layers, heads, dim = self._shape
        old = self._stores.get(tier)
        have_rows, have_length = (old.shape[2], old.shape[4]) if old is not None else (0, 0)
        if rows <= have_rows and length <= have_length:
            return int(have_length)
        rows = have_rows if rows <= have_rows else max(_round_up(rows), have_rows * 3 // 2)
        if self._tiers:
            length = int(self._lengths[tier])
        else:
            length = have_length if length <= have_length else max(_round_up(length), have_length * 3 // 2)
        length = _round_up(length)  # so that attention may read whole steps of positions
        # zeros, not empty: masked positions have weight 0, and 0 times a stray NaN would still be NaN
        store = torch.zeros((layers, 2, rows, heads, length, dim), dtype=self._dtype, device=self._device)
        if old is not None:
            store[:, :, :have_rows, :, :have_length] = old
        self._stores[tier] = store
        return int(store.shape[4])


def _tier_lengths(fine: bool) -> Ints:
    """Positions of each tier. A row is copied once a tier: finely, since the CPU pays for each padded position.

    Elsewhere a call costs more than padding, and tiers double.
    """
    lengths = [_SHORTEST if fine else 8 * _SHORTEST]
    while lengths[-1] < _LONGEST:
        longest = lengths[-1]
        grown = -(-max(longest + _SHORTEST, longest * 5 // 4) // _SHORTEST) * _SHORTEST
        lengths.append(grown if fine else 2 * longest)
    return np.asarray(lengths)


def _round_up(size: int) -> int:
    return -(-size // _ROWS) * _ROWS
