"""Half of the log-probability probe: a few completions of the start weights by the configured engine, as a file.

    actors.probe ──tokens, log-probabilities of the sampler──► FILE.npz ──► learner.probe ──► how far the two differ

``python -m actors.probe CONFIG.toml --out FILE.npz``; ``async-rl doctor CONFIG`` runs both.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.engines.base import Completion, Engine, Request
from actors.engines.factory import make_engine
from async_rl.config import load_config
from async_rl.errors import DeadlineError
from async_rl.models import load_causal_lm, load_tokenizer, resolve_model
from async_rl.process import host_id, run_guarded
from async_rl.tasks import load_task
from async_rl.tasks.prompt import encode_prompt
from async_rl.weights.manifest import Manifest, Tensor, chunk_checksums, combine

PROMPTS, SAMPLES = 16, 2
TIMEOUT_S = 120.0


def flat_version(model: torch.nn.Module, chunk_bytes: int) -> tuple[Manifest, memoryview]:
    """The model's parameters as version 0 in one flat buffer, laid out one after the other."""
    tensors, parts, offset = [], [], 0
    for name, parameter in model.named_parameters():
        tensors.append(Tensor(name, str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape), offset))
        parts.append(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        offset += parts[-1].nbytes
    data = memoryview(np.concatenate(parts))
    chunks = chunk_checksums(data, chunk_bytes)
    manifest = Manifest(
        version=0,
        run_id="probe",
        tensors=tuple(tensors),
        nbytes=offset,
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        checksum=combine(chunks),
        segment="",
        host=host_id(),
    )
    return manifest, data


def sample(engine: Engine, requests: list[Request]) -> list[Completion]:
    """All completions of the requests, in order of request and sample.

    Raises:
        DeadlineError: the engine did not finish in time.
    """
    engine.submit(requests)
    wanted, deadline = sum(r.num_samples for r in requests), time.monotonic() + TIMEOUT_S
    done: list[Completion] = []
    while len(done) < wanted:
        if time.monotonic() > deadline:
            raise DeadlineError(f"the engine finished {len(done)} of {wanted} samples in {TIMEOUT_S:.0f} s")
        done += engine.step(1.0)
    return sorted(done, key=lambda c: (c.request_id, c.sample))


def as_arrays(prompts: list[tuple[int, ...]], completions: list[Completion]) -> dict[str, Any]:
    """Sequences laid end to end: tokens, their lengths, the prompts' lengths, and the sampler's log-probabilities."""
    sequences = [np.concatenate([np.asarray(prompts[c.request_id], np.int64), c.tokens]) for c in completions]
    return {
        "tokens": np.concatenate(sequences),
        "lengths": np.array([len(s) for s in sequences]),
        "prompt_lengths": np.array([len(prompts[c.request_id]) for c in completions]),
        "logprobs": np.concatenate([c.logprobs for c in completions]),
    }


def main() -> None:
    """Sample and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    config = load_config(args.config)
    folder = resolve_model(config.model.path)
    tokenizer = load_tokenizer(folder)
    problems = load_task(config.task, config.seed).train[:PROMPTS]
    prompts = [encode_prompt(tokenizer, p, config.task) for p in problems]
    manifest, data = flat_version(load_causal_lm(folder, config.model.dtype, "cpu"), config.weights.chunk_bytes)
    engine = make_engine(config, folder, "probe")
    try:
        engine.load_weights(manifest, data)
        completions = sample(
            engine,
            [
                Request(
                    id=i,
                    prompt=prompt,
                    num_samples=SAMPLES,
                    seed=(config.seed, i),
                    max_new_tokens=config.sampling.max_new_tokens,
                    temperature=config.sampling.temperature,
                )
                for i, prompt in enumerate(prompts)
            ],
        )
    finally:
        engine.close()
    with args.out.open("wb") as file:
        np.savez(file, **as_arrays(prompts, completions))


if __name__ == "__main__":
    run_guarded(main)
