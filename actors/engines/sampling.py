"""Sampling as pure functions: one uniform number per token, turned into a token by the inverse of the CDF.

    (seed, sample, position) ──Philox──► u ─┐
    logits / temperature ──softmax──► CDF ──┴──► first token whose cumulative probability exceeds u

A token depends on seed, prompt and weights only, never on what is decoded beside it or how it is split into steps.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch

_STREAM = 2**64
"""Philox blocks between the streams of two samples: sample ``s`` starts at counter ``s * 2**64``."""
_BLOCK = 4
"""Numbers per Philox block."""


def uniforms(seed: tuple[int, ...], first: int, num_samples: int, count: int) -> npt.NDArray[np.float64]:
    """The uniform numbers of samples ``first`` to ``first + num_samples - 1``.

    Args:
        seed: the request's random stream; any integers.
        first: index of the first sample.
        num_samples: rows of the result.
        count: numbers per sample; a longer draw begins with the shorter one.

    Returns:
        float64 [num_samples, count] in [0, 1).
    """
    key = int.from_bytes(hashlib.blake2b(repr(tuple(map(int, seed))).encode(), digest_size=16).digest(), "little")
    philox = np.random.Philox(key=key, counter=first * _STREAM)
    generator = np.random.Generator(philox)
    rows = np.empty((num_samples, count))
    for row in rows:
        generator.random(out=row)
        philox.advance(_STREAM - -(-count // _BLOCK))
    return rows


def sample_tokens(
    logits: torch.Tensor, temperature: npt.NDArray[np.float32], u: npt.NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probabilities, ``num_draws`` per row of logits.

    Probabilities are float32, their cumulative sum float64, so that the last tokens of a large vocabulary keep theirs.
    A token of probability zero is never drawn, not even with ``u`` next to 1.

    Args:
        logits: [num_rows, vocab], any float type.
        temperature: [num_rows]; 0 is greedy, with log-probabilities at temperature 1.
        u: [num_rows, num_draws] in [0, 1).

    Returns:
        tokens int64 and logprobs float32, both [num_rows, num_draws], on the device of ``logits``.
    """
    device = logits.device
    greedy = temperature == 0
    scaled = logits.float()
    if not np.all(greedy | (temperature == 1)):
        scaled = scaled / torch.from_numpy(np.where(greedy, np.float32(1), temperature)).to(device)[:, None]
    logprobs = scaled.log_softmax(-1)
    if greedy.all():
        tokens = logprobs.argmax(-1, keepdim=True).expand(-1, u.shape[1])
    else:
        tokens = _inverse_cdf(logprobs, torch.from_numpy(u).to(device))
        if greedy.any():
            tokens = torch.where(
                torch.from_numpy(greedy).to(device)[:, None], logprobs.argmax(-1, keepdim=True), tokens
            )
    return tokens, logprobs.gather(-1, tokens)


def _inverse_cdf(logprobs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:].contiguous()
    tokens = torch.searchsorted(cdf, u * total, right=True)  # first index with cdf > u * total
    last = torch.searchsorted(cdf, total)  # the last token with a probability: u * total can round up to total
    # not-a-number logits sort anywhere; keep the index valid, their log-probability tells
    return torch.minimum(tokens, last).clamp_(max=logprobs.shape[-1] - 1)
