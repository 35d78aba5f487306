"""Tiny models for the embedded engine, and plain forwards of them."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from actors.engines.base import Request
from actors.engines.torch_engine import TorchEngine
from async_rl.weights.manifest import Manifest, Tensor, chunk_checksums, combine

VOCAB = 40
STOP = 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # far from uniform, so that a wrong position or mask shows
}
MODELS = {
    "grouped": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2)),
    "tied": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    ),
}


def published(model, version=0, **changes):
    """Manifest and bytes of a model's parameters, with gaps between tensors as a publisher may leave them."""
    tensors, data = [], bytearray()
    for name, parameter in model.named_parameters():
        data += bytes(-len(data) % 64)
        tensors.append(Tensor(name, str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape), len(data)))
        data += parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()
    chunks = chunk_checksums(memoryview(data), 1000)
    fields = {
        "version": version,
        "run_id": "r",
        "tensors": tuple(tensors),
        "nbytes": len(data),
        "chunk_bytes": 1000,
        "chunks": chunks,
        "checksum": combine(chunks),
        "segment": "",
        "host": "",
    }
    return Manifest(**(fields | changes)), memoryview(bytes(data))


def plain(folder: Path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def make(folder, *, slots=16, context=64, kv_cache="keep", stops=(STOP,), dtype=torch.float32):
    engine = TorchEngine(
        folder,
        device=torch.device("cpu"),
        dtype=dtype,
        slots=slots,
        context=context,
        stop_token_ids=stops,
        kv_cache=kv_cache,
    )
    engine.load_weights(*published(plain(folder, dtype)))
    return engine


def request(id=0, prompt=(5, 6, 7), num_samples=1, max_new_tokens=10, temperature=1.0):
    return Request(
        id=id,
        prompt=tuple(prompt),
        num_samples=num_samples,
        seed=(11, id),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
    )


def various(count=6, **changes):
    """Requests with prompts of 1 to ``count`` tokens."""
    rng = np.random.default_rng(3)
    return [request(i, rng.integers(3, VOCAB, i + 1), **{"num_samples": 3, **changes}) for i in range(count)]


def drain(engine):
    done = {}
    while engine.num_running:
        for c in engine.step(0.0):
            assert (c.request_id, c.sample) not in done
            done[c.request_id, c.sample] = c
    return done


@torch.no_grad()
def logprobs_of(model, prompt, tokens, temperature=1.0):
    """Log-probabilities [num_tokens] of a completion by one plain forward."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    table = (logits / temperature).log_softmax(-1)
    return table[torch.arange(len(tokens)), torch.as_tensor(tokens, dtype=torch.int64)].numpy()


@torch.no_grad()
def greedy(model, prompt, count):
    """Greedy completion without any cache."""
    tokens = []
    while len(tokens) < count and (not tokens or tokens[-1] != STOP):
        tokens.append(int(model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, -1].argmax()))
    return tokens
