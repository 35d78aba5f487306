"""The doctor's probe finds each planted fault, with the torch engine and a random model; both halves in one process."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.engines.base import Request
from actors.engines.torch_engine import TorchEngine
from actors.probe.faults import PlantedEngine
from actors.probe.main import flat_version, record
from async_rl.errors import WeightsError
from async_rl.models import load_causal_lm
from async_rl.probe import changed
from learner.probe.main import Probe, read, read_back

pytestmark = pytest.mark.real

CONTEXT, STOP = 64, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Qwen2 of 2 layers with weights so large that its distributions are far from uniform."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=STOP,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def probe(folder, wrap=lambda engine, seen: engine, plant=None, kv_cache="keep", T=1.0):
    """All findings by name."""
    engine = TorchEngine(
        folder,
        device=torch.device("cpu"),
        dtype=torch.float32,
        slots=32,
        context=CONTEXT,
        stop_token_ids=[STOP],
        kv_cache=kv_cache,
    )
    requests = [
        Request(id=i, prompt=(5 + i, 6, 7), num_samples=2, seed=(0, i), max_new_tokens=16, temperature=T)
        for i in range(6)
    ]
    seen = []
    model = load_causal_lm(folder, "float32", "cpu")
    found = record(wrap(engine, seen), dict(model.named_parameters()), requests, CONTEXT)
    engine.close()
    arrays = found.arrays()
    lines = [
        read_back([*arrays["refused"], *seen]),
        *Probe(model, read(arrays), kv_cache, "float32", plant).lines(),
    ]
    return {line.name: line for line in lines}


def plant(folder, fault, **options):
    return probe(folder, lambda engine, seen: PlantedEngine(engine, fault, seen), fault, **options)


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
@pytest.mark.parametrize("T", [1.0, 0.6])
def test_a_sound_engine_passes_and_a_swap_in_flight_is_checked_token_by_token(folder, kv_cache, T):
    found = probe(folder, kv_cache=kv_cache, T=T)
    assert {name: line.level for name, line in found.items()} == {
        "read-back": "ok",
        "log-probabilities": "ok",
        "delivered weights": "ok",
        "version stamps": "ok",
    }
    assert "requests that a swap met in flight" in found["version stamps"].detail


@pytest.mark.parametrize("T", [1.0, 0.6])
@pytest.mark.parametrize(("fault", "side"), [("temperature", "engine"), ("temperature-learner", "learner")])
def test_a_temperature_on_one_side_only_is_found_at_temperature_1_too(folder, fault, side, T):
    line = plant(folder, fault, T=T)["log-probabilities"]
    assert line.level == "wrong"
    assert line.detail.startswith(f"the {side}'s log-probabilities are those at temperature 1 instead of ")
    assert line.remedy


@pytest.mark.parametrize(("fault", "side"), [("shift", "engine"), ("shift-learner", "learner")])
def test_shifted_log_probabilities_are_found_and_the_side_is_named(folder, fault, side):
    line = plant(folder, fault)["log-probabilities"]
    assert line.level == "wrong"
    assert line.detail.startswith(f"the {side}'s log-probabilities are shifted by one position")


def test_a_version_stamp_that_is_off_by_one_is_found(folder):
    found = plant(folder, "version")
    assert found["log-probabilities"].level == found["delivered weights"].level == "ok"
    assert found["version stamps"].level == "wrong"
    assert "off by one: tokens that version 0 sampled are stamped 1" in found["version stamps"].detail


def middle_tensor(folder):
    names = [name for name, _ in load_causal_lm(folder, "float32", "cpu").named_parameters()]
    return names[len(names) // 2]


def test_a_corrupted_tensor_is_refused_by_the_engine_and_past_its_proof_seen_in_the_log_probabilities(folder):
    found = plant(folder, "corrupt")
    assert found["read-back"].level == "wrong"
    assert found["read-back"].detail.endswith(f"what differs lies within {middle_tensor(folder)}")
    assert found["delivered weights"].level == "wrong"
    assert "at least one tensor is corrupted" in found["delivered weights"].detail


def test_a_tensor_that_was_never_delivered_is_named_by_both_lines_of_defence(folder):
    found = plant(folder, "missing")
    assert found["read-back"].detail.endswith(f"what differs lies within {middle_tensor(folder)}")
    assert found["delivered weights"].level == "wrong"
    assert f"lacks one tensor: {middle_tensor(folder)} is still that of version 0" in found["delivered weights"].detail


class Wrapped:
    """A sound engine; subclasses make one fault that is no planted one."""

    def __init__(self, engine, seen):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)


class StampsLate(Wrapped):
    """The first token of a new version still carries the old stamp."""

    def step(self, timeout_s):
        return [replace(c, versions=np.append(c.versions[:1], c.versions[:-1])) for c in self.engine.step(timeout_s)]


class NeverSwaps(Wrapped):
    """Takes the first version only, and stamps the later ones."""

    version = -1

    def load_weights(self, manifest, data):
        if self.version < 0:
            self.engine.load_weights(manifest, data)
        self.version = manifest.version
        return manifest.checksum

    def step(self, timeout_s):
        return [replace(c, versions=np.full_like(c.versions, self.version)) for c in self.engine.step(timeout_s)]


class Refuses(Wrapped):
    """Takes nothing after version 0."""

    def load_weights(self, manifest, data):
        if manifest.version:
            raise WeightsError("version 1: no")
        return self.engine.load_weights(manifest, data)


def test_stamps_that_are_one_token_late_at_a_swap_are_found(folder):
    line = probe(folder, StampsLate)["version stamps"]
    assert line.level == "wrong"
    assert "off by one where a swap met running requests" in line.detail
    assert "1 token(s) that the new version sampled carry the old one" in line.detail


def test_an_engine_that_never_swaps_is_found(folder):
    line = probe(folder, NeverSwaps)["delivered weights"]
    assert line.level == "wrong"
    assert "are those of version 0: no swap took place" in line.detail


def test_a_kv_cache_that_is_not_as_configured_is_found(folder):
    """Recomputed by the engine, kept by the configuration."""

    class Recomputes(Wrapped):
        def load_weights(self, manifest, data):
            checksum = self.engine.load_weights(manifest, data)
            self.engine._recompute = True
            return checksum

    line = probe(folder, Recomputes)["version stamps"]
    assert line.level == "wrong"
    assert "actors.kv_cache is not what the engine does" in line.detail


def test_a_refused_version_is_a_finding_and_the_rounds_before_it_are_still_judged(folder):
    found = probe(folder, Refuses)
    assert found["read-back"].detail == "the engine refused a version: version 1: no"
    assert found["log-probabilities"].level == found["version stamps"].level == "ok"
    assert "delivered weights" not in found


def test_every_tensor_changes_with_the_version_and_the_same_way_in_both_halves():
    start = {"a": torch.ones(5, 3), "b": torch.zeros(4), "c": torch.randn(7, 2).bfloat16()}
    for name, tensor in start.items():
        assert changed(tensor, name, 0) is tensor
        one, two = changed(tensor, name, 1), changed(tensor, name, 2)
        assert one.shape == tensor.shape
        assert one.dtype == tensor.dtype
        assert torch.equal(one, changed(tensor.clone(), name, 1))
        assert (one != tensor).float().mean() > 0.8
        assert (one != two).float().mean() > 0.8


def test_each_tensor_of_a_probe_version_has_chunks_of_its_own():
    manifest, data = flat_version({"a": torch.ones(5, 3), "b": torch.zeros(4), "c": torch.ones(3).bfloat16()}, 0)
    manifest.check()
    manifest.verify(data)
    assert [t.offset % manifest.chunk_bytes for t in manifest.tensors] == [0, 0, 0]
    assert len(manifest.chunks) == 3
