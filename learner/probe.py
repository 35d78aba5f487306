"""Half of the log-probability probe: the learner's log-probabilities of what an engine sampled, against the engine's.

    actors.probe ──tokens, log-probabilities of the sampler──► FILE.npz ──► learner.probe ──► {"mean": ..., "max": ...}

``python -m learner.probe CONFIG.toml FILE.npz``; ``async-rl doctor CONFIG`` runs both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from async_rl.config import load_config
from async_rl.models import device_for, load_causal_lm, resolve_model
from async_rl.process import run_guarded
from learner.logprobs import predicted_logprobs


def learner_logprobs(model: Any, arrays: Mapping[str, npt.NDArray[Any]], temperature: float) -> npt.NDArray[np.float32]:
    """Log-probabilities of the completions' tokens, one forward pass a sequence.

    Args:
        model: a causal language model.
        arrays: ``tokens`` laid end to end, ``lengths`` and ``prompt_lengths`` per sequence.
        temperature: of the sampler.

    Returns:
        float32, as many as there are sampled tokens.
    """
    device = next(model.parameters()).device
    parts, start = [], 0
    for length, num_prompt in zip(arrays["lengths"], arrays["prompt_lengths"], strict=True):
        tokens_L = torch.as_tensor(arrays["tokens"][start : start + length], device=device)
        source_N = torch.arange(num_prompt - 1, length - 1, device=device)
        with torch.no_grad():
            logprobs_N, _ = predicted_logprobs(model, tokens_L[None, :-1], source_N, tokens_L[num_prompt:], temperature)
        parts.append(logprobs_N.float().cpu().numpy())
        start += int(length)
    return np.concatenate(parts)


def main() -> None:
    """Compare and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    config = load_config(args.config)
    model = load_causal_lm(resolve_model(config.model.path), config.model.dtype, device_for(config.model.device, 0))
    with np.load(args.file, allow_pickle=False) as arrays:
        difference = np.abs(learner_logprobs(model, arrays, config.sampling.temperature) - arrays["logprobs"])
    print(json.dumps({"tokens": len(difference), "mean": float(difference.mean()), "max": float(difference.max())}))


if __name__ == "__main__":
    run_guarded(main)
