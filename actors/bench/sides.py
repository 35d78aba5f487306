"""The engines of the benchmark behind one function: requests in, tokens and their log-probabilities out.

ours    the product's ``torch`` engine, in :meth:`TorchEngine.step`
vllm    vLLM's engine in this process, which is its fastest way on a CPU
loop    a batch of requests at a time, decoded together until the last one ends: no scheduler, no refill
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from actors.bench.load import Load, Side
from actors.engines.base import Request
from actors.engines.torch_engine import TorchEngine
from actors.engines.vllm_settings import CPU_DEFAULTS, CPU_ENVIRONMENT, DEFAULTS, ENVIRONMENT
from actors.probe.main import flat_version
from async_rl.models import last_hidden, load_causal_lm


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sample."""

    request_id: int
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


Run = Callable[[Sequence[Request]], Iterable[Sampled]]


def make_side(side: Side, folder: Path, load: Load, slots: int) -> Run:
    """Make an engine with the folder's weights and so many slots; it decodes requests when it is called."""
    return {"ours": _ours, "vllm": _vllm, "loop": _loop}[side](folder, load, slots)


def worst_error(folder: Path, requests: Sequence[Request], sampled: Iterable[Sampled]) -> float:
    """Largest difference of log-probabilities of a few samples (temperature 1) from those of a plain forward."""
    model = load_causal_lm(folder, "float32", "cpu")
    prompts = {request.id: request.prompt for request in requests}
    worst = 0.0
    for sample in sampled:
        ids = torch.tensor([[*prompts[sample.request_id], *sample.tokens.tolist()]])
        with torch.inference_mode():
            table = model(ids, use_cache=False).logits[0].log_softmax(-1)
        first = ids.shape[1] - len(sample.tokens)
        expected = table[torch.arange(first - 1, ids.shape[1] - 1), ids[0, first:]].numpy()
        worst = max(worst, float(np.abs(sample.logprobs - expected).max()))
    return worst


def _ours(folder: Path, load: Load, slots: int) -> Run:
    engine = TorchEngine(
        folder,
        device=torch.device("cpu"),
        dtype=torch.float32,
        slots=slots,
        context=load.context,
        stop_token_ids=load.stop_token_ids,
    )
    engine.load_weights(*flat_version(dict(load_causal_lm(folder, "float32", "cpu").named_parameters()), 0))

    def run(requests: Sequence[Request]) -> Iterable[Sampled]:
        engine.submit(requests)
        done: list[Sampled] = []
        while engine.num_running:
            done += [Sampled(c.request_id, c.tokens, c.logprobs) for c in engine.step(0.0)]
        return done

    return run


def _vllm(folder: Path, load: Load, slots: int) -> Run:
    os.environ.update({**ENVIRONMENT, **CPU_ENVIRONMENT, **CPU_DEFAULTS})
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # this process runs on one core already
    for key, value in DEFAULTS.items():
        os.environ.setdefault(key, value)
    from vllm import EngineArgs, SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    model = load_causal_lm(folder, "float32", "cpu", weights=False).config
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    token = 2 * 4 * model.num_hidden_layers * heads * dim  # bytes of keys and values
    blocks = -(-load.context // 128) * 128  # its pages
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder),
            dtype="float32",
            max_model_len=load.context,
            max_num_seqs=slots,
            max_num_batched_tokens=max(8192, slots),
            kv_cache_memory_bytes=(slots + 1) * blocks * token,  # none waits for memory
            skip_tokenizer_init=True,
            generation_config="vllm",
            enforce_eager=True,
            disable_log_stats=True,
        )
    )

    def run(requests: Sequence[Request]) -> Iterable[Sampled]:
        for request in requests:
            sampling = SamplingParams(
                n=request.num_samples,
                temperature=request.temperature,
                max_tokens=request.max_new_tokens,
                stop_token_ids=list(load.stop_token_ids),
                ignore_eos=not load.stop_token_ids,
                logprobs=0,  # the sampled token's
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(request.id), tokens_input(list(request.prompt)), sampling)
        done: list[Sampled] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                done += [
                    Sampled(
                        int(output.request_id),
                        np.asarray(sample.token_ids, np.int32),
                        np.asarray(sample.logprobs.logprobs, np.float32),
                    )
                    for sample in output.outputs
                ]
        return done

    return run


def _loop(folder: Path, load: Load, slots: int) -> Run:
    model = load_causal_lm(folder, "float32", "cpu")

    def run(requests: Sequence[Request]) -> Iterable[Sampled]:
        samples = [request for request in requests for _ in range(request.num_samples)]
        done: list[Sampled] = []
        for start in range(0, len(samples), slots):
            done += _batch(model, samples[start : start + slots], load)
        return done

    return run


@torch.inference_mode()
def _batch(model: Any, samples: Sequence[Request], load: Load) -> list[Sampled]:
    """Decode one batch, prompts padded on the left, until the last one has ended."""
    from transformers import StaticCache

    longest = max(len(s.prompt) for s in samples)
    ids = torch.tensor([[0] * (longest - len(s.prompt)) + list(s.prompt) for s in samples])
    padding = torch.tensor([longest - len(s.prompt) for s in samples])
    limits = torch.tensor([s.max_new_tokens for s in samples])
    stops = torch.tensor(load.stop_token_ids, dtype=torch.int64)
    size = longest + int(limits.max())
    seen = torch.arange(size)[None] >= padding[:, None]
    cache = StaticCache(model.config, max_cache_len=size)
    tokens, logprobs = torch.zeros(len(samples), size, dtype=torch.int64), torch.zeros(len(samples), size)
    going, lengths = torch.ones(len(samples), dtype=torch.bool), torch.zeros(len(samples), dtype=torch.int64)
    positions = (torch.arange(longest)[None] - padding[:, None]).clamp(min=0)
    head = model.get_output_embeddings()
    for step in range(int(limits.max())):
        hidden = last_hidden(
            model,
            ids,
            attention_mask=seen[:, : longest + step],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        table = head(hidden[:, -1]).float().log_softmax(-1)
        ids = torch.multinomial(table.exp(), 1)
        tokens[:, step], logprobs[:, step] = ids[:, 0], table.gather(-1, ids)[:, 0]
        lengths += going
        going &= ~torch.isin(ids[:, 0], stops) & (lengths < limits)
        if not going.any():
            break
        positions = positions[:, -1:] + 1
    return [
        Sampled(s.id, tokens[i, :n].int().numpy(), logprobs[i, :n].numpy())
        for i, (s, n) in enumerate(zip(samples, lengths.tolist(), strict=True))
    ]
