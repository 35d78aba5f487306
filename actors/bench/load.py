"""What the engines of the benchmark decode: sums of two-digit numbers, the same requests for each of them.

lengths    a prompt each, no stop token; the most tokens of each request are drawn from a log-normal distribution
task       16 samples of each prompt, up to 16 tokens, ended by the model, as in the preset ``arithmetic``

With ``lengths`` every engine samples the same number of tokens, and samples have little more than a prompt's head in
common: what an engine gains by sharing prefixes shows with ``task`` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from actors.engines.base import Request
from async_rl.config import parse_config
from async_rl.lengths import Lengths
from async_rl.models import load_tokenizer, stop_token_ids
from async_rl.tasks.addition import problems
from async_rl.tasks.prompt import encode_prompt

CaseName = Literal["lengths", "task"]
Side = Literal["ours", "vllm", "loop"]

MEDIAN, LONGEST = 32, 256
"""Tokens of an answer of ``lengths``; p99 / p50 is 10 before the cut."""
GROUP_SIZE, MAX_NEW = 16, 16
"""Of ``task``."""
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests, and what they need."""

    requests: Sequence[Request]
    stop_token_ids: tuple[int, ...]
    context: int
    """Longest sequence: prompt and most tokens of any request."""

    def seeded(self, run: int) -> list[Request]:
        """The same requests with the random numbers of a run."""
        return [
            Request(
                id=request.id,
                prompt=request.prompt,
                num_samples=request.num_samples,
                seed=(_SEED, run, request.id),
                max_new_tokens=request.max_new_tokens,
                temperature=request.temperature,
            )
            for request in self.requests
        ]


def make_load(case: CaseName, folder: Path, sequences: int) -> Load:
    """The requests of a case, the same each time: ``sequences`` samples in all.

    Args:
        case: which.
        folder: of the model, for its tokenizer and stop tokens.
        sequences: how many; ``task`` rounds up to whole groups.
    """
    tokenizer, config = load_tokenizer(folder), parse_config({})
    rng = np.random.default_rng(_SEED)
    size = GROUP_SIZE if case == "task" else 1
    number = -(-sequences // size)
    sums = [problem for _, problem in problems(2)]
    prompts = [encode_prompt(tokenizer, sums[i], config.task) for i in rng.permutation(len(sums))[:number]]
    prompts = [prompts[i % len(prompts)] for i in range(number)]
    limits = [MAX_NEW] * number
    if case == "lengths":
        limits = Lengths(kind="lognormal", median=MEDIAN, longest=LONGEST).draw(rng, number).tolist()
    requests = [
        Request(id=i, prompt=prompt, num_samples=size, seed=(_SEED, 0, i), max_new_tokens=limit, temperature=1.0)
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    return Load(
        requests=requests,
        stop_token_ids=stop_token_ids(folder) if case == "task" else (),
        context=max(len(request.prompt) + request.max_new_tokens for request in requests),
    )
