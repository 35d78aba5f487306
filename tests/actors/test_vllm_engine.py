"""Real vLLM on a tiny random Qwen2: log-probabilities, versions per token, proof of weights, death of the process."""

from __future__ import annotations

import hashlib
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
from transformers import Qwen2ForCausalLM

from actors.engines.base import Completion, Request
from actors.engines.vllm_engine import VLLMEngine, fresh_seed
from async_rl.errors import AsyncRLError, StartAgainError, WeightsError
from async_rl.weights.manifest import Tensor
from tests.actors.broadcasting import Sender
from tests.actors.vllm_models import (
    CONTEXT,
    PROMPT,
    STOP,
    VOCAB,
    ask,
    describe,
    forced,
    mixed_reference,
    publish,
    reference,
    tiny,
)

pytestmark = [
    pytest.mark.real,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


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


def swap_while_running(engine: VLLMEngine, *models: Qwen2ForCausalLM) -> list[Completion]:
    """Completions of long requests; each further model is loaded when another short request of 20 tokens is through."""
    first, *others = models
    load(engine, first)
    engine.submit([ask(0, samples=8, new=CONTEXT - len(PROMPT))])
    for number, model in enumerate(others, 1):
        engine.submit([ask(number, samples=1, new=20, temperature=0.0)])
        while engine.num_running == 9:
            short = engine.step(1.0)
        assert [c.request_id for c in short] == [number]
        load(engine, model)
    return finish(engine)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., VLLMEngine]]:
    engines = []

    def make(
        tied: bool, kv_cache: Any, dtype: Any = "float32", sleep_mode: bool = False, broadcast: bool = False
    ) -> VLLMEngine:
        folder = tmp_path_factory.mktemp("model")
        tiny(0, tied).save_pretrained(folder)
        engine = VLLMEngine(
            str(folder),
            dtype=dtype,
            max_num_seqs=32,
            context=CONTEXT,
            stop_token_ids=[STOP],
            seed=fresh_seed(0, "test"),
            kv_cache=kv_cache,
            sleep_mode=sleep_mode,
            broadcast=broadcast,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in engine.pids)


@pytest.fixture(scope="module")
def engine(start: Callable[..., VLLMEngine]) -> VLLMEngine:
    """Tied embeddings, which vLLM's CPU build gets wrong by itself; KV recomputed at updates; versions by broadcast."""
    engine = start(tied=True, kv_cache="recompute", broadcast=True)
    assert engine.version == -1
    return engine


@pytest.fixture(scope="module")
def keeping(start: Callable[..., VLLMEngine]) -> VLLMEngine:
    """Untied embeddings; KV kept at updates; with sleep mode, as in colocated runs."""
    return start(tied=False, kv_cache="keep", sleep_mode=True)


def test_nothing_is_sampled_before_the_first_version(engine: VLLMEngine):
    engine.submit([ask(1, samples=2, new=2)])
    assert engine.step(0.3) == []
    assert not engine.proven
    load(engine, forced(3, tied=True))
    assert engine.proven
    assert [c.tokens.tolist() for c in finish(engine)] == [[3, 3]] * 2


def test_a_version_by_broadcast_is_swapped_in_under_running_requests(engine: VLLMEngine):
    load(engine, forced(3, tied=True))
    before, sender = engine.version, Sender()
    engine.submit([ask(0, samples=4, new=200), ask(1, samples=1, new=20)])
    while engine.num_running == 5:
        engine.step(1.0)  # the short one is through
    manifest, data = publish(forced(9, tied=True), before + 1)
    assert engine.receive_weights(manifest, sender.begin(manifest, data)) == manifest.checksum
    assert (sender.finish().error, engine.version, engine.proven) == ("", before + 1, True)
    for completion in finish(engine):
        swapped = int((completion.versions == before).sum())
        assert 20 <= swapped < 200
        assert completion.tokens.tolist() == [3] * swapped + [9] * (200 - swapped)
        assert completion.versions.tolist() == [before] * swapped + [before + 1] * (200 - swapped)


def test_what_is_not_received_is_loaded_and_nothing_is_sampled_before_it_is_proven(engine: VLLMEngine):
    load(engine, forced(3, tied=True))
    before, sender = engine.version, Sender(deadline_s=0.5)
    manifest, data = publish(forced(9, tied=True), before + 1)
    with pytest.raises(WeightsError, match=r"the broadcast did not begin: 1 of 2 receivers did not come"):
        engine.receive_weights(manifest, sender.begin(manifest, data, world=3))
    assert sender.finish().missing == (2,)
    assert (engine.version, engine.proven) == (before, True)
    engine.submit([ask(0, samples=1, new=3)])
    assert [c.tokens.tolist() for c in finish(engine)] == [[3, 3, 3]]  # it goes on with what it has
    wrong = bytearray(data)
    wrong[5000] ^= 1
    with pytest.raises(WeightsError, match=r"the engine does not hold model\.embed_tokens\.weight as it was published"):
        engine.receive_weights(manifest, sender.begin(manifest, wrong))
    assert sender.finish().error == ""
    assert not engine.proven
    engine.submit([ask(1, samples=1, new=3)])
    assert engine.step(0.3) == []
    engine.load_weights(manifest, memoryview(data))
    assert [c.tokens.tolist() for c in finish(engine)] == [[9, 9, 9]]


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
    np.testing.assert_allclose(c.logprobs, reference(model, c.tokens), atol=1e-4)
    ids = torch.tensor([[*PROMPT, *c.tokens.tolist()]])
    assert model(ids).logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist() == c.tokens.tolist()


def test_a_stop_token_ends_a_completion_and_is_part_of_it(engine: VLLMEngine):
    load(engine, forced(STOP, tied=True))
    engine.submit([ask(1, samples=1)])
    (c,) = finish(engine)
    assert (c.tokens.tolist(), c.logprobs.tolist(), c.finish_reason) == ([STOP], [0.0], "stop")


def test_swaps_keep_running_requests_and_each_token_has_the_version_that_sampled_it(engine: VLLMEngine):
    forced_tokens = (3, 9, 4, 11)
    completions = swap_while_running(engine, *(forced(t, tied=True) for t in forced_tokens))
    assert len(completions) == 8
    for c in completions:
        age = engine.version - c.versions
        assert sorted(c.versions) == c.versions.tolist()
        assert set(age) == {0, 1, 2, 3}
        assert c.tokens.tolist() == [forced_tokens[3 - a] for a in age]  # a stale tied head would go on with 3
        assert len(c.tokens) == CONTEXT - len(PROMPT)
    assert 0 < engine.last_pause_s < 1


def test_after_a_swap_that_recomputes_each_span_is_a_clean_forward_of_its_version(engine: VLLMEngine):
    models = [tiny(3, tied=True), tiny(4, tied=True)]
    completions = swap_while_running(engine, *models)
    for c in completions:
        new = c.versions == engine.version
        expected = np.where(new, reference(models[1], c.tokens), reference(models[0], c.tokens))
        np.testing.assert_allclose(c.logprobs, expected, atol=1e-4)
    assert any((c.versions == engine.version).any() and (c.versions < engine.version).any() for c in completions)


def fused_digests(model: Qwen2ForCausalLM) -> dict[str, str]:
    """SHA-256 of each parameter as vLLM fuses them: rows of q, k, v, and of gate and up, behind each other."""
    fused = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
    fused |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
    held: dict[str, bytes] = {}
    for name, parameter in model.named_parameters():
        owner = ".".join(fused.get(part, part) for part in name.split("."))
        held[owner] = held.get(owner, b"") + parameter.detach().numpy().tobytes()
    return {name: hashlib.sha256(data).hexdigest() for name, data in held.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_after_a_swap_vllm_itself_says_that_it_holds_the_published_bytes(tied: bool, request: pytest.FixtureRequest):
    engine = request.getfixturevalue("engine" if tied else "keeping")
    digests = []
    for seed in (6, 7):
        load(engine, tiny(seed, tied))
        (held,) = engine._thread.call(engine._thread._engine.compute_weight_checksums(), 30.0, "digests")
        digests.append({name.rpartition(":")[2]: digest for name, digest in held.items()})
        assert digests[-1] == fused_digests(tiny(seed, tied))
    assert not digests[0].items() & digests[1].items()
    assert {"model.layers.1.self_attn.qkv_proj.bias", "model.layers.0.mlp.gate_up_proj.weight"} <= digests[0].keys()


@pytest.mark.parametrize("fault", ["name", "shape", "missing"])
def test_a_version_that_does_not_fit_is_refused_and_the_one_before_goes_on(engine: VLLMEngine, fault: str):
    load(engine, forced(3, tied=True))
    before = engine.version
    engine.submit([ask(1, samples=2, new=200)])
    manifest, data = publish(tiny(5, tied=True), before + 1)
    name = expected = "model.layers.1.mlp.up_proj.weight"
    tensors = {t.name: t for t in manifest.tensors}
    tensor = tensors[name]
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
    assert (engine.version, engine.proven) == (before, True)
    for c in finish(engine):
        assert c.tokens.tolist() == [3] * 200
        assert set(c.versions.tolist()) == {before}


def test_one_flipped_byte_is_refused_and_nothing_is_sampled_until_a_good_version_comes(engine: VLLMEngine):
    load(engine, forced(3, tied=True))
    engine.submit([ask(1, samples=2, new=200)])
    manifest, data = publish(tiny(5, tied=True), engine.version + 1)
    name = "model.layers.1.mlp.up_proj.weight"
    offset = next(t.offset for t in manifest.tensors if t.name == name) + 1
    data[offset] ^= 1
    with pytest.raises(WeightsError, match=rf"chunk {offset // 4096} \(.*{name}"):
        engine.load_weights(manifest, memoryview(data))
    assert (engine.version, engine.proven) == (manifest.version - 1, False)
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


def test_kept_kv_is_that_of_the_old_weights_which_moves_the_log_probabilities(keeping: VLLMEngine):
    models = [tiny(3, tied=False), tiny(4, tied=False)]
    distance = 0.0
    for c in swap_while_running(keeping, *models):
        new = c.versions == keeping.version
        np.testing.assert_allclose(c.logprobs[~new], reference(models[0], c.tokens)[~new], atol=1e-4)
        if new.any():
            expected = mixed_reference(*models, c.tokens, int(new.argmax()))
            np.testing.assert_allclose(c.logprobs[new], expected, atol=1e-4)
            distance = max(distance, np.abs(expected - reference(models[1], c.tokens)[new]).max())
    assert distance > 0.1


def test_a_prompt_that_was_read_before_is_read_again_by_the_new_weights(keeping: VLLMEngine):
    prompt = tuple(range(100))  # several blocks of KV, which a prefix cache would hand over from version to version
    for seed in (5, 5, 6):
        model = tiny(seed, tied=False)
        load(keeping, model)
        keeping.submit([ask(1, prompt=prompt), ask(2, prompt=prompt)])
        for c in finish(keeping):
            np.testing.assert_allclose(c.logprobs, reference(model, c.tokens, prompt=prompt), atol=1e-4)


def test_after_sleep_nothing_is_sampled_before_a_new_version_is_proven(keeping: VLLMEngine):
    load(keeping, forced(3, tied=False))
    keeping.submit([ask(1, new=50)])
    with pytest.raises(AsyncRLError, match="4 samples run"):
        keeping.sleep()
    finish(keeping)
    for wakes in (True, False):
        keeping.sleep()
        keeping.sleep()
        assert not keeping.proven
        if wakes:  # else the version wakes it
            keeping.wake()
            keeping.wake()
        keeping.submit([ask(1, samples=2, new=4)])
        assert keeping.step(0.3) == []
        manifest, data = publish(forced(5, tied=False), keeping.version + 1)
        data[8] ^= 1
        with pytest.raises(WeightsError, match="chunk 0 "):
            keeping.load_weights(manifest, memoryview(data))
        assert keeping.step(0.3) == []
        load(keeping, forced(7, tied=False))
        for c in finish(keeping):
            assert c.tokens.tolist() == [7] * 4
            assert c.versions.tolist() == [keeping.version] * 4


def test_bfloat16_agrees_with_a_plain_forward_as_far_as_bfloat16_goes(start: Callable[..., VLLMEngine]):
    engine = start(tied=True, kv_cache="keep", dtype="bfloat16")
    model = tiny(1, tied=True).bfloat16()
    load(engine, model)
    engine.submit([ask(1, samples=16)])
    completions = finish(engine)
    delta = np.concatenate([np.abs(c.logprobs - reference(model, c.tokens)) for c in completions])
    exact = tiny(1, tied=True).bfloat16().float()  # the same weights, with float32 sums
    noise = np.concatenate([np.abs(reference(model, c.tokens) - reference(exact, c.tokens)) for c in completions])
    print(
        f"bfloat16: engine to Hugging Face {delta.mean():.4f} ({delta.max():.3f} at most), its noise {noise.mean():.4f}"
    )
    assert delta.mean() < 3 * noise.mean() < 0.1
    engine.close()


def test_death_of_the_process_is_an_error_at_once(keeping: VLLMEngine):
    load(keeping, tiny(1, tied=False))
    keeping.submit([ask(2, samples=8, new=200)])
    os.kill(keeping.pids[0], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(StartAgainError, match=r"vLLM|Engine"):
        keeping.step(30.0)
    assert time.monotonic() - began < 3.0
    for call in (
        lambda: keeping.submit([ask(3)]),
        lambda: load(keeping, tiny(1, tied=False)),
        keeping.sleep,
    ):
        with pytest.raises(AsyncRLError):
            call()


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
