"""Tiny Qwen2 models for the vLLM engine's tests: published as the learner does, and forwarded by Hugging Face."""

from __future__ import annotations

import numpy as np
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from actors.engines.base import Request
from async_rl.process import host_id
from async_rl.weights.manifest import Manifest, Tensor, chunk_checksums, combine

HIDDEN, VOCAB, CONTEXT, STOP = 64, 128, 256, 127
PROMPT = (5, 17, 99, 23, 42)


def tiny(seed: int, tied: bool) -> Qwen2ForCausalLM:
    """Weights large enough that two seeds give clearly different distributions."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.15) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def forced(token: int, tied: bool) -> Qwen2ForCausalLM:
    """Weights under which every next token is ``token``: only the first hidden unit counts, and its row is the largest.

    Both blocks add 0. Row t of embedding and head is (1, 0, 0, ...), that of ``token`` (10, 0, 0, ...); the final norm
    gives (sqrt(64), 0, ...) times 10, so the logits are 80, and 800 for ``token``: its log-probability is 0.
    """
    model = tiny(0, tied)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name or "norm" in name:
                parameter.zero_()
            if "embed" in name or "lm_head" in name:
                parameter.zero_()
                parameter[:, 0] = 1.0
                parameter[token, 0] = 10.0
        model.model.norm.weight[0] = 10.0
    return model


def publish(model: Qwen2ForCausalLM, version: int) -> tuple[Manifest, bytearray]:
    tensors, data = [], bytearray()
    for name, parameter in model.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        tensors.append(Tensor(name, dtype, tuple(parameter.shape), len(data)))
        data += parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return describe(tuple(tensors), data, version), data


def describe(tensors: tuple[Tensor, ...], data: bytearray, version: int, segment: str = "") -> Manifest:
    chunks = chunk_checksums(memoryview(data), 4096)
    return Manifest(
        version=version,
        run_id="test",
        tensors=tensors,
        nbytes=len(data),
        chunk_bytes=4096,
        chunks=chunks,
        checksum=combine(chunks),
        segment=segment,
        host=host_id(),
    )


def reference(
    model: Qwen2ForCausalLM, tokens: np.ndarray, temperature: float = 1.0, prompt: tuple[int, ...] = PROMPT
) -> np.ndarray:
    """Log-probability of each completion token after the prompt, by one clean forward of Hugging Face."""
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def mixed_reference(old: Qwen2ForCausalLM, new: Qwen2ForCausalLM, tokens: np.ndarray, swapped: int) -> np.ndarray:
    """Log-probabilities of ``tokens[swapped:]`` by the new weights on a KV cache that the old ones computed.

    The token before ``swapped`` was sampled by the old weights, but is read by the new ones.
    """
    ids = torch.tensor([[*PROMPT, *tokens.tolist()]])
    seen = len(PROMPT) + swapped - 1
    with torch.no_grad():
        cache = old(ids[:, :seen], past_key_values=DynamicCache(config=old.config), use_cache=True).past_key_values
        logits = new(ids[:, seen:-1], past_key_values=cache, use_cache=True).logits[0]
    return logits.log_softmax(-1).gather(1, ids[0, seen + 1 :, None])[:, 0].numpy()


def ask(
    id: int, samples: int = 4, new: int = 24, temperature: float = 1.0, prompt: tuple[int, ...] = PROMPT
) -> Request:
    return Request(id=id, prompt=prompt, num_samples=samples, seed=(0, id), max_new_tokens=new, temperature=temperature)
