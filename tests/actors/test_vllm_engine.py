"""Real vLLM on a tiny random Qwen2: log-probabilities, versions per token, proof of weights, death of the process."""

from __future__ import annotations

import importlib.util
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from actors.engines.base import Completion, Request
from actors.engines.vllm_engine import VLLMEngine, fresh_seed
from async_rl.errors import AsyncRLError, WeightsError
from async_rl.process import host_id
from async_rl.weights.manifest import Manifest, Tensor, chunk_checksums, combine

pytestmark = [
    pytest.mark.real,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
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
        tensors.append(Tensor(name, "float32", tuple(parameter.shape), len(data)))
        data += parameter.detach().numpy().tobytes()
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


def reference(model: Qwen2ForCausalLM, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probability of each completion token after PROMPT, by Hugging Face."""
    ids = torch.tensor([[*PROMPT, *tokens.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()


def ask(id: int, samples: int = 4, new: int = 24, temperature: float = 1.0) -> Request:
    return Request(id=id, prompt=PROMPT, num_samples=samples, seed=(0, id), max_new_tokens=new, temperature=temperature)


def finish(engine: VLLMEngine, timeout_s: float = 60.0) -> list[Completion]:
    completions: list[Completion] = []
    deadline = time.monotonic() + timeout_s
    while engine.num_running:
        assert time.monotonic() < deadline
        completions += engine.step(1.0)
    return completions


def load(engine: VLLMEngine, model: Qwen2ForCausalLM) -> str:
    manifest, data = publish(model, engine.version + 1)
    checksum = engine.load_weights(manifest, memoryview(data))
    assert checksum == manifest.checksum
    assert engine.version == manifest.version
    return checksum


def swap_while_running(engine: VLLMEngine, before: Any, after: Any) -> list[Completion]:
    """Load ``after`` once a short request is through, so that the long ones have some twenty tokens by then."""
    load(engine, before)
    engine.submit([ask(1, samples=1, new=20), ask(2, samples=8, new=CONTEXT - len(PROMPT))])
    while engine.num_running == 9:
        short = engine.step(1.0)
    assert [c.request_id for c in short] == [1]
    load(engine, after)
    return finish(engine)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., VLLMEngine]]:
    engines = []

    def make(tied: bool, kv_cache: Any) -> VLLMEngine:
        folder = tmp_path_factory.mktemp("model")
        tiny(0, tied).save_pretrained(folder)
        engine = VLLMEngine(
            str(folder),
            dtype="float32",
            max_num_seqs=32,
            context=CONTEXT,
            stop_token_ids=[STOP],
            seed=fresh_seed(0, "test"),
            kv_cache=kv_cache,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in engine.pids)


@pytest.fixture(scope="module")
def engine(start: Callable[..., VLLMEngine]) -> VLLMEngine:
    """Tied embeddings, which vLLM's CPU build gets wrong by itself; KV recomputed at updates."""
    engine = start(tied=True, kv_cache="recompute")
    assert engine.version == -1
    return engine


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_the_distribution_that_was_sampled(engine: VLLMEngine, temperature: float):
    model = tiny(1, tied=True)
    load(engine, model)
    engine.submit([ask(7, temperature=temperature), ask(8, temperature=temperature)])
    assert engine.num_running == 8
    completions = finish(engine)
    assert sorted((c.request_id, c.sample) for c in completions) == [(i, s) for i in (7, 8) for s in range(4)]
    assert len({tuple(c.tokens) for c in completions}) > 1
    for c in completions:
        np.testing.assert_allclose(c.logprobs, reference(model, c.tokens, temperature), atol=1e-4)
        assert c.versions.tolist() == [engine.version] * len(c.tokens)
        assert (c.finish_reason == "stop") == (c.tokens[-1] == STOP)
        assert c.finish_reason == "stop" or len(c.tokens) == 24


def test_greedy_takes_the_most_likely_token_and_reports_it_at_temperature_1(engine: VLLMEngine):
    model = tiny(2, tied=True)
    load(engine, model)
    engine.submit([ask(1, samples=1, temperature=0.0)])
    (c,) = finish(engine)
    np.testing.assert_allclose(c.logprobs, reference(model, c.tokens, 1.0), atol=1e-4)
    ids = torch.tensor([[*PROMPT, *c.tokens.tolist()]])
    assert model(ids).logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist() == c.tokens.tolist()


def test_a_stop_token_ends_a_completion_and_is_part_of_it(engine: VLLMEngine):
    load(engine, forced(STOP, tied=True))
    engine.submit([ask(1, samples=1)])
    (c,) = finish(engine)
    assert (c.tokens.tolist(), c.logprobs.tolist(), c.finish_reason) == ([STOP], [0.0], "stop")


def test_a_swap_keeps_running_requests_and_each_token_has_the_version_that_sampled_it(engine: VLLMEngine):
    completions = swap_while_running(engine, forced(3, tied=True), forced(9, tied=True))
    assert len(completions) == 8
    for c in completions:
        old, new = engine.version - 1, engine.version
        assert c.tokens.tolist() == [3 if v == old else 9 for v in c.versions]  # a stale tied head would go on with 3
        assert sorted(c.versions) == c.versions.tolist()
        assert (c.versions == old).sum() > 0
        assert (c.versions == new).sum() > 0
        assert len(c.tokens) == CONTEXT - len(PROMPT)


def test_after_a_swap_that_recomputes_each_span_is_a_clean_forward_of_its_version(engine: VLLMEngine):
    models = [tiny(3, tied=True), tiny(4, tied=True)]
    completions = swap_while_running(engine, *models)
    for c in completions:
        new = c.versions == engine.version
        expected = np.where(new, reference(models[1], c.tokens, 1.0), reference(models[0], c.tokens, 1.0))
        np.testing.assert_allclose(c.logprobs, expected, atol=1e-4)
    assert any((c.versions == engine.version).any() and (c.versions < engine.version).any() for c in completions)


@pytest.mark.parametrize("fault", ["byte", "name", "shape", "missing"])
def test_bytes_that_were_not_published_are_refused_and_nothing_is_sampled_until_good_ones_come(
    engine: VLLMEngine, fault: str
):
    load(engine, forced(3, tied=True))
    engine.submit([ask(1, samples=2, new=200)])
    manifest, data = publish(tiny(5, tied=True), engine.version + 1)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = {t.name: t for t in manifest.tensors}
    tensor = tensors[name]
    if fault == "byte":
        data[tensor.offset + 1] ^= 1
        expected = f"chunk {tensor.offset // 4096} "
    else:
        expected = name
        if fault == "name":
            tensors[name] = Tensor(f"{name}s", tensor.dtype, tensor.shape, tensor.offset)
        elif fault == "shape":
            tensors[name] = Tensor(name, tensor.dtype, (tensor.shape[0], tensor.shape[1] // 2), tensor.offset)
        else:
            del tensors[name]
            expected = "model.layers.1.mlp.gate_up_proj.weight"
        manifest = describe(tuple(tensors.values()), data, manifest.version)
    with pytest.raises(WeightsError, match=expected.replace(".", r"\.")):
        engine.load_weights(manifest, memoryview(data))
    assert engine.version == manifest.version - 1
    assert engine.step(0.3) == []
    load(engine, forced(9, tied=True))
    for c in finish(engine):
        assert c.tokens.tolist() == [3 if v == engine.version - 1 else 9 for v in c.versions]
        assert len(c.tokens) == 200


def test_a_segment_of_the_learner_is_mapped_and_its_present_content_is_what_counts(engine: VLLMEngine, tmp_path: Path):
    manifest, data = publish(forced(6, tied=True), engine.version + 1)
    path = tmp_path / "segment"
    path.write_bytes(data)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as segment:
        view = memoryview(segment)
        here = describe(manifest.tensors, data, manifest.version, segment=str(path))
        assert engine.load_weights(here, view) == manifest.checksum
        engine.submit([ask(1, samples=1, new=4)])
        assert finish(engine)[0].tokens.tolist() == [6] * 4
        segment[0] ^= 1  # the slot is overwritten by a later version
        with pytest.raises(WeightsError, match="chunk 0 "):
            engine.load_weights(here, view)
        view.release()
    load(engine, forced(6, tied=True))


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ask(1, new=CONTEXT), "do not fit the context of 256"),
        (Request(id=1, prompt=(), num_samples=1, seed=(0,), max_new_tokens=1, temperature=1.0), "0 prompt tokens"),
        (
            Request(id=1, prompt=(VOCAB,), num_samples=1, seed=(0,), max_new_tokens=1, temperature=1.0),
            "outside 0 .. 127",
        ),
    ],
)
def test_a_request_that_cannot_be_decoded_is_refused_at_once(engine: VLLMEngine, request_: Request, reason: str):
    with pytest.raises(ValueError, match=reason):
        engine.submit([ask(2), request_])
    assert engine.num_running == 0


def test_an_aborted_request_yields_nothing_and_its_id_is_free_again(engine: VLLMEngine):
    load(engine, forced(3, tied=True))
    engine.submit([ask(1, new=200)])
    with pytest.raises(ValueError, match="in flight already"):
        engine.submit([ask(1)])
    engine.abort([1, 99])
    assert engine.num_running == 0
    engine.submit([ask(1, samples=1, new=2)])
    (c,) = finish(engine)
    assert c.tokens.tolist() == [3, 3]


def test_untied_weights_are_swapped_with_kept_kv_and_death_of_the_process_is_an_error_at_once(start: Any):
    engine = start(tied=False, kv_cache="keep")
    model = tiny(1, tied=False)
    load(engine, model)
    engine.submit([ask(1)])
    for c in finish(engine):
        np.testing.assert_allclose(c.logprobs, reference(model, c.tokens, 1.0), atol=1e-4)
    for c in swap_while_running(engine, forced(3, tied=False), forced(9, tied=False)):
        assert c.tokens.tolist() == [3 if v == engine.version - 1 else 9 for v in c.versions]
        assert {engine.version - 1, engine.version} == set(c.versions.tolist())

    engine.submit([ask(2, samples=8, new=200)])
    os.kill(engine.pids[0], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(AsyncRLError, match=r"vLLM|Engine"):
        engine.step(30.0)
    assert time.monotonic() - began < 3.0
    with pytest.raises(AsyncRLError):
        engine.submit([ask(3)])
    with pytest.raises(AsyncRLError):
        load(engine, model)


def test_two_starts_of_an_engine_do_not_sample_alike():
    assert len({fresh_seed(0, "actor-0") for _ in range(10)}) == 10
    assert 0 <= fresh_seed(0, "actor-0") < 2**31


@pytest.fixture
def short() -> Iterator[str]:
    """A temporary folder with a path short enough for sockets, for what a killed process leaves."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


def test_no_process_is_left_when_ours_is_killed(tmp_path: Path, short: str):
    tiny(0, tied=True).save_pretrained(tmp_path)
    script = tmp_path / "start.py"
    script.write_text(
        "from actors.engines.vllm_engine import VLLMEngine\n"
        "if __name__ == '__main__':\n"
        f"    engine = VLLMEngine({str(tmp_path)!r}, dtype='float32', max_num_seqs=4, context=64, stop_token_ids=[],\n"
        "                        seed=1)\n"
        "    print('PIDS', *engine.pids, flush=True)\n"
        "    engine.step(600.0)\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": short},
    )
    try:
        line = next((text for text in process.stdout or [] if text.startswith("PIDS")), "")
        pids = [int(p) for p in line.split()[1:]]
        assert pids
    finally:
        process.kill()
        process.wait(10)
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        os.sched_yield()


def alive(pid: int) -> bool:
    """Whether a process runs (one that nobody has reaped yet does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
