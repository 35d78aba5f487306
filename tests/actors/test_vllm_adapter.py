"""Real vLLM with an adapter: log-probabilities, versions of running requests, and the proof of what its slot holds."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from actors.engines.base import Completion
from actors.engines.vllm_engine import VLLMEngine, fresh_seed
from async_rl.adapter import names_of, published_name
from async_rl.config import LoraConfig
from async_rl.errors import WeightsError
from async_rl.weights.manifest import Manifest
from learner.adapter import add_adapter
from learner.logprobs import predicted_logprobs
from tests.actors.vllm_models import CONTEXT, PROMPT, STOP, ask, publish, reference, tiny

pytestmark = [
    pytest.mark.real,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed"),
]

LORA = LoraConfig(rank=3, alpha=5, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


class Tensors(dict[str, torch.Tensor]):
    """As a model's parameters, to be published."""

    def named_parameters(self):
        return self.items()


def adapter(seed: int, rank: int = LORA.rank) -> Tensors:
    torch.manual_seed(seed)
    found = Tensors()
    for name, layer in tiny(0, tied=True).named_modules():
        if name.rpartition(".")[2] in LORA.targets:
            a, b = names_of(name)
            found[a], found[b] = torch.randn(rank, layer.in_features) / 8, torch.randn(layer.out_features, rank) / 8
    return found


def merged(tensors: Tensors) -> Qwen2ForCausalLM:
    """The base with W + α/r B A, multiplied out in float64."""
    model = tiny(0, tied=True)
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in LORA.targets:
            a, b = (tensors[n].double() for n in names_of(name))
            layer.weight.data = (layer.weight.double() + 5 / 3 * b @ a).float()
    return model


@torch.no_grad()
def learned(tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities of a completion as the learner computes them, its policy having this adapter."""
    policy = tiny(0, tied=True)
    add_adapter(policy, LORA, seed=0)
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(tensors[published_name(name)])
    ids = torch.tensor([[*PROMPT, *tokens.tolist()]])
    read = torch.arange(len(PROMPT) - 1, ids.shape[1] - 1)
    return predicted_logprobs(policy, ids, read, ids[0, len(PROMPT) :], 1.0)[0].numpy()


def load(engine: VLLMEngine, tensors: Tensors) -> Manifest:
    manifest, data = publish(tensors, engine.version + 1)
    assert engine.load_weights(manifest, memoryview(data)) == manifest.checksum
    return manifest


def finish(engine: VLLMEngine) -> list[Completion]:
    completions: list[Completion] = []
    deadline = time.monotonic() + 60.0
    while engine.num_running:
        assert time.monotonic() < deadline
        completions += engine.step(1.0)
    return completions


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny(0, tied=True).save_pretrained(folder)
    engine = VLLMEngine(
        str(folder),
        dtype="float32",
        max_num_seqs=32,
        context=CONTEXT,
        stop_token_ids=[STOP],
        seed=fresh_seed(0, "test"),
        kv_cache="recompute",
        lora=LORA,
    )
    yield engine
    engine.close()


def test_log_probabilities_are_those_of_the_merged_weights_and_of_the_learners_policy(engine: VLLMEngine):
    engine.submit([ask(0, samples=1, new=2)])
    assert engine.step(0.3) == []  # nothing is sampled from the bare base
    for seed in (1, 2):
        tensors = adapter(seed)
        load(engine, tensors)
        engine.submit([ask(seed)])
        completions = finish(engine)
        assert len(completions) == (5 if seed == 1 else 4)
        for c in completions:
            np.testing.assert_allclose(c.logprobs, reference(merged(tensors), c.tokens), atol=1e-4)
            np.testing.assert_allclose(c.logprobs, learned(tensors, c.tokens), atol=1e-4)
            assert c.versions.tolist() == [engine.version] * len(c.tokens)
            assert abs(c.logprobs - reference(tiny(0, tied=True), c.tokens)).max() > 1e-2


def test_running_requests_go_on_with_the_new_version(engine: VLLMEngine):
    before, after = adapter(3), adapter(4)
    load(engine, before)
    engine.submit([ask(0, samples=8, new=CONTEXT - len(PROMPT)), ask(1, samples=1, new=20, temperature=0.0)])
    while engine.num_running == 9:
        engine.step(1.0)
    load(engine, after)
    assert 0 < engine.last_pause_s < 1
    completions = finish(engine)
    old, new = merged(before), merged(after)
    for c in completions:
        is_new = c.versions == engine.version
        np.testing.assert_allclose(
            c.logprobs, np.where(is_new, reference(new, c.tokens), reference(old, c.tokens)), atol=1e-4
        )
    assert any((c.versions == engine.version).any() and (c.versions < engine.version).any() for c in completions)


def test_what_has_no_place_is_refused_and_the_version_before_goes_on(engine: VLLMEngine):
    tensors = adapter(5)
    load(engine, tensors)
    lacking = Tensors(tensors)
    lacking.popitem()
    elsewhere = Tensors({name.replace("layers.1", "layers.7"): tensor for name, tensor in tensors.items()})
    for other in (tiny(0, tied=True), adapter(1, rank=4), lacking, elsewhere):
        manifest, data = publish(other, engine.version + 1)
        with pytest.raises(WeightsError):
            engine.load_weights(manifest, memoryview(data))
    assert engine.proven
    engine.submit([ask(9)])
    for c in finish(engine):
        np.testing.assert_allclose(c.logprobs, reference(merged(tensors), c.tokens), atol=1e-4)


def test_bytes_that_are_not_those_published_are_found_in_the_slot(engine: VLLMEngine):
    manifest, data = publish(adapter(6), engine.version + 1)
    data[manifest.tensors[2].offset] ^= 1
    with pytest.raises(WeightsError, match="is not what was published"):
        engine.load_weights(manifest, memoryview(data))
    assert not engine.proven
    load(engine, adapter(6))
