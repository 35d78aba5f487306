"""The embedded engine: continuous batching of any Hugging Face decoder in one process, weights swapped between steps.

                     ┌ decode: one token per row of running samples ┐
    submit ──admit──►┤                                              ├► last hidden ─head─► sample ─► record ─► output
                     └ prefill: one row per new prompt              ┘                                  │
                                                          rows of the next step ◄──────plan_rows───────┘

Work is done per *row*, a distinct token prefix, not per sample: the samples of a prompt share its row, and go on
sharing one as long as they draw equal tokens. A short answer that most samples agree on is decoded about once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from actors.engines.adapter_weights import AdapterWeights
from actors.engines.attention import ATTENTION
from actors.engines.base import Completion, Request
from actors.engines.decoder import Decoder, decodes
from actors.engines.flat_weights import FlatWeights
from actors.engines.incoming import Incoming
from actors.engines.kv_cache import KVCache
from actors.engines.linear import padded, use_onednn
from actors.engines.rows import Ints, plan_rows
from actors.engines.sampling import sample_tokens
from actors.engines.slots import Slots
from async_rl.config import LoraConfig
from async_rl.errors import AsyncRLError, WeightsError
from async_rl.models import check_head, last_hidden, load_causal_lm
from async_rl.weights.channel import device_name
from async_rl.weights.manifest import Manifest
from async_rl.weights.offer import Offer

_PREFILL_TOKENS = 16_384
"""Most tokens (padding included) of one prefill forward."""
_LOGITS = 1 << 23
"""Most logits that are held at the same time."""

_SLOWER = (
    "the engine's own decode step does not give what this model's forward gives; it decodes with that one, slower. "
    "Please report the architecture"
)


class TorchEngine:
    """Implements :class:`actors.engines.base.Engine` for Hugging Face decoder models.

    Args:
        model_path: Hugging Face folder; weights come with :meth:`load_weights`, but for the base of an adapter.
        device: where the model and its KV cache live.
        dtype: of both; log-probabilities are float32 always.
        slots: samples decoded at the same time.
        context: longest sequence, prompt and completion.
        stop_token_ids: tokens that end a completion.
        kv_cache: whether a swap keeps the KV of running samples or computes it anew with the new weights.
        lora: of the adapter that versions bring; None: they bring the whole model.

    Raises:
        ConfigError: no model there, or one that the engine cannot run.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        slots: int,
        context: int,
        stop_token_ids: Sequence[int],
        kv_cache: Literal["keep", "recompute"] = "keep",
        lora: LoraConfig | None = None,
    ) -> None:
        self._model = load_causal_lm(model_path, dtype, device, weights=lora is not None).requires_grad_(False)
        self._tiers = bool(getattr(self._model, "_supports_attention_backend", False))
        self._pads = use_onednn(self._model)
        if self._tiers:
            self._model.set_attn_implementation(ATTENTION)
        self._head = self._model.get_output_embeddings()
        self._device, self._context, self._recompute = device, context, kv_cache == "recompute"
        config = self._model.config
        self._vocab = int(config.vocab_size)
        self._make_cache = partial(
            KVCache,
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            dtype=dtype,
            device=device,
            tiers=self._tiers,
        )
        self._cache = self._make_cache()
        self._decoder = Decoder(self._model, onednn=self._pads) if self._tiers and decodes(self._model) else None
        self._weights = (
            FlatWeights(dict(self._model.named_parameters())) if lora is None else AdapterWeights(self._model, lora)
        )
        self._incoming = Incoming(device)
        self._version = -1
        self._proven = False
        self._last_pause_s = 0.0
        self._slots = Slots(slots, stop_token_ids)
        self._cached: Ints = np.empty(0, np.int64)  # [num_rows] positions of each row that the cache holds
        self._pending: Ints = np.empty(0, np.int64)  # [num_rows] token of each row that was drawn but not yet read
        self._tier: Ints = np.empty(0, np.int64)  # [num_rows] where the cache has each row
        self._place: Ints = np.empty(0, np.int64)

    @property
    def version(self) -> int:
        """Weight version that samples now; -1 before the first."""
        return self._version

    @property
    def proven(self) -> bool:
        """Whether it may sample: its weights are those of :attr:`version`, by their checksum."""
        return self._proven

    @property
    def last_pause_s(self) -> float:
        """Seconds that the last :meth:`load_weights` took, all of them without decoding."""
        return self._last_pause_s

    @property
    def num_running(self) -> int:
        """Samples that are decoded or wait for a slot."""
        return self._slots.num_running

    def fileno(self) -> None:
        """None: :meth:`step` does the work itself."""
        return

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none.

        Raises:
            ValueError: an id is in flight already, a prompt does not fit the context, or a field is out of range.
        """
        seen: set[int] = set()
        for request in requests:
            self._check(request)
            if request.id in self._slots or request.id in seen:
                raise ValueError(f"request {request.id} is in flight already")
            seen.add(request.id)
        for request in requests:
            self._slots.submit(request)

    def step(self, timeout_s: float) -> list[Completion]:
        """Fill free slots, give each running sample one token, return those that ended. Never waits: idle is ``[]``.

        Raises:
            WeightsError: no version was loaded and proven, or it gives log-probabilities that are not numbers.
        """
        if not self.num_running:
            return []
        if not self._proven:
            raise WeightsError("the engine holds no proven version of the weights: load one before sampling")
        with torch.inference_mode():
            hidden = self._decode() if len(self._cached) else []
            new = [np.asarray(request.prompt, np.int64) for request in self._slots.admit(len(self._cached))]
            if new:
                hidden.append(self._prefill(self._append(np.array([len(prompt) for prompt in new])), new))
            tokens, logprobs = self._sample(torch.cat(hidden))
            rows = self._slots.row[self._slots.active]
            completions, going = self._slots.record(tokens, logprobs, self._version)
            self._branch(rows[going], tokens[going].astype(np.int64))
            return completions

    def load_weights(self, manifest: Manifest, data: memoryview) -> str:
        """Swap in a version; running samples go on and their later tokens carry it.

        Raises:
            WeightsError: it is not of this model (nothing has changed then), or the engine's memory does not have the
                published checksum (nothing is sampled then until a version is proven).
        """
        began = time.perf_counter()
        return self._prove(manifest, self._weights.load(manifest, data), began)

    def devices(self) -> list[str]:
        """Where a broadcast arrives."""
        return [device_name(self._device)]

    def receive_weights(self, manifest: Manifest, offer: Offer) -> str:
        """As :meth:`load_weights`, from the learner's device: blocks arrive where the model reads them.

        Raises:
            WeightsError: it did not begin: the version before goes on. Or it broke off, or is not what was published:
                nothing is sampled until a version is proven.
        """
        began = time.perf_counter()
        if not isinstance(self._weights, FlatWeights):
            raise WeightsError(f"version {manifest.version}: adapters are not broadcast")
        self._weights.fit(manifest)
        self._incoming.meet(offer)
        self._proven = False
        return self._prove(manifest, self._weights.receive(manifest, self._incoming.take), began)

    def _prove(self, manifest: Manifest, checksum: str, began: float) -> str:
        if checksum != manifest.checksum:
            self._proven = False
            raise WeightsError(
                f"version {manifest.version}: the engine holds {checksum}, published was {manifest.checksum}; what "
                f"differs lies within {', '.join(self._weights.differing(manifest)[:5])}"
            )
        if self._version < 0:
            check_head(self._model)
            if self._decoder is not None and not self._decoder.agrees(self._make_cache()):
                print(f"async-rl: warning: {_SLOWER}", file=sys.stderr, flush=True)
                self._decoder = None
        self._version, self._proven = manifest.version, True
        if self._recompute and len(self._cached):
            prefixes = self._slots.prefixes(len(self._cached))
            with torch.inference_mode():
                read = [p[:n].astype(np.int64) for p, n in zip(prefixes, self._cached, strict=True)]
                self._prefill(np.arange(len(read)), read)
        self._last_pause_s = time.perf_counter() - began
        return checksum

    def abort(self, request_ids: Sequence[int]) -> None:
        """Drop requests with all their samples."""
        self._slots.abort(request_ids)
        rows = self._slots.row[self._slots.active]
        with torch.inference_mode():
            self._branch(rows, self._pending[rows])

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back to the device; only while nothing runs.

        Raises:
            AsyncRLError: samples run.
        """
        if self.num_running:
            raise AsyncRLError(f"{self.num_running} samples run: an engine goes to sleep only when none does")
        self._proven = False
        self._weights.free()
        self._cache.free()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # or torch would keep it from the learner's process

    def wake(self) -> None:
        """Nothing: :meth:`load_weights` and :meth:`step` take memory when they need it."""

    def close(self) -> None:
        """Free model and cache, leave the broadcasts."""
        self._incoming.close()
        self._slots = Slots(0, ())
        del self._model, self._head, self._decoder, self._weights, self._cache

    def _check(self, request: Request) -> None:
        length = len(request.prompt) + request.max_new_tokens
        if length > self._context:
            raise ValueError(
                f"request {request.id}: a prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones "
                f"do not fit the model's context of {self._context}"
            )
        if not request.prompt or request.num_samples < 1 or request.max_new_tokens < 1 or request.temperature < 0:
            raise ValueError(f"request {request.id}: empty prompt, or a number out of range: {request}")
        if min(request.prompt) < 0 or max(request.prompt) >= self._vocab:
            raise ValueError(f"request {request.id}: a prompt token lies outside the vocabulary of {self._vocab}")

    def _decode(self) -> list[torch.Tensor]:
        mask = self._cache.begin_decode(self._tier, self._cached)
        num_rows = len(self._cached)
        inputs_host = np.zeros((2, padded(num_rows) if self._pads and self._tiers else num_rows), np.int64)
        inputs_host[:, :num_rows] = self._pending, self._cached
        inputs = torch.from_numpy(inputs_host).to(self._device)
        if self._decoder is not None:
            self._cached = self._cached + 1
            return [self._decoder.decode(inputs[0], inputs[1], self._cache)[:num_rows]]
        hidden = last_hidden(
            self._model,
            inputs[0][:, None],
            attention_mask=mask,
            position_ids=inputs[1][:, None],
            past_key_values=self._cache,
            use_cache=True,
            **({"tiers": self._cache} if self._tiers else {}),
        )
        self._cached = self._cached + 1
        return [hidden[:num_rows, 0]]

    def _append(self, lengths: Ints) -> Ints:
        """Rows for prompts, behind the others; their numbers."""
        rows = np.arange(len(lengths)) + len(self._cached)
        tier = self._cache.tier_for(lengths + 1)
        place = np.empty_like(tier)
        for number in np.unique(tier):
            place[tier == number] = np.arange((tier == number).sum()) + (self._tier == number).sum()
        self._cached = np.concatenate([self._cached, lengths])
        self._tier, self._place = np.concatenate([self._tier, tier]), np.concatenate([self._place, place])
        return rows

    def _prefill(self, rows: Ints, prompts: Sequence[Ints]) -> torch.Tensor:
        """Read whole prompts into rows, those of like length together; last hidden states [num_prompts, hidden]."""
        lengths = np.array([len(prompt) for prompt in prompts])
        order = np.argsort(lengths, kind="stable")
        hidden = []
        for start, stop in _chunks(lengths[order].tolist(), _PREFILL_TOKENS):
            chosen = order[start:stop]
            ids = np.zeros((stop - start, lengths[chosen[-1]]), np.int64)
            ids[np.arange(ids.shape[1]) < lengths[chosen, None]] = np.concatenate([prompts[i] for i in chosen])
            self._cache.begin_prefill(self._tier[rows[chosen]], self._place[rows[chosen]], ids.shape[1])
            # padded on the right: what comes after a prompt's end is not seen by it, and overwritten later
            ids_device = torch.from_numpy(ids).to(self._device)
            if self._decoder is not None:
                states = self._decoder.read(ids_device, self._cache)
            else:
                states = last_hidden(
                    self._model,
                    ids_device,
                    position_ids=torch.arange(ids.shape[1], device=self._device)[None],
                    past_key_values=self._cache,
                    use_cache=True,
                )
            index = torch.from_numpy(np.stack([np.arange(len(chosen)), lengths[chosen] - 1])).to(self._device)
            hidden.append(states[index[0], index[1]])
        back = torch.from_numpy(np.argsort(order)).to(self._device)
        return torch.cat(hidden)[back]

    def _sample(self, hidden: torch.Tensor) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Token and log-probability of each running sample, in one transfer to the host."""
        draws = self._slots.draws(len(hidden))
        size = max(1, _LOGITS // self._vocab)
        parts = []
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            tokens, logprobs = sample_tokens(self._logits(hidden[rows]), draws.temperature[rows], draws.u[rows])
            parts.append(torch.stack([tokens.int(), logprobs.view(torch.int32)]))
        packed = torch.cat(parts, 1).cpu().numpy()[:, draws.row, draws.rank]
        logprobs_host = packed[1].view(np.float32)
        if not np.isfinite(logprobs_host).all():
            raise WeightsError(f"version {self._version} of the weights gives log-probabilities that are not numbers")
        return packed[0], logprobs_host

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        num_rows = len(hidden)
        more = padded(num_rows) - num_rows if self._pads else 0
        logits: torch.Tensor = self._head(torch.nn.functional.pad(hidden, (0, 0, 0, more)) if more else hidden)
        return logits[:num_rows]

    def _branch(self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """Give each distinct continuation of a row its own row, and free rows that nothing continues."""
        plan = plan_rows(rows, tokens, self._tier, self._place, self._cache.tier_for(self._cached + 1))
        if plan.copies:
            self._cache.copy(plan.copies, int(self._cached.max()))
        self._cached, self._pending = self._cached[plan.parent], plan.token
        self._tier, self._place = plan.tier, plan.place
        self._cache.trim(self._tier)
        self._slots.move(plan.row)


def _chunks(lengths: Sequence[int], budget: int) -> Iterator[tuple[int, int]]:
    """Ranges (start, stop) of consecutive prompts whose padded size is within ``budget``, at least one prompt each."""
    start, longest = 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if index > start and longest * (index + 1 - start) > budget:
            yield start, index
            start, longest = index, length
    if lengths:
        yield start, len(lengths)
