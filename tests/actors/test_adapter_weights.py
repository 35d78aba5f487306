"""The embedded engine with an adapter, against plain forwards of W + α/r B A multiplied out."""

import pytest
import torch
from engine_models import MODELS, drain, logprobs_of, make, plain, published, request, various
from torch import nn

from actors.engines import adapter_weights
from actors.engines.adapter_weights import AdapterWeights
from actors.engines.torch_engine import TorchEngine
from actors.engines.vllm_settings import adapter_arguments
from async_rl.adapter import names_of
from async_rl.config import LoraConfig
from async_rl.errors import WeightsError

LORA = LoraConfig(rank=2, alpha=5, targets=("q_proj", "k_proj", "o_proj", "up_proj"))


def test_vllm_is_told_of_a_layer_by_its_last_name_alone_as_it_knows_no_other():
    told = adapter_arguments(LoraConfig(rank=3, targets=("layers.0.self_attn.q_proj", "down_proj", "mlp.down_proj")))
    assert told["lora_target_modules"] == ["q_proj", "down_proj"]
    assert told["max_lora_rank"] == 8


class Tensors(dict):
    """As a model's parameters, to be published."""

    def named_parameters(self):
        return self.items()


@pytest.fixture(scope="module", params=MODELS)
def folder(tmp_path_factory, request):
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp(request.param)
    MODELS[request.param]().save_pretrained(path)
    return path


def layers_of(model):
    return {n: m for n, m in model.named_modules() if n.rpartition(".")[2] in LORA.targets}


def adapter(model, seed, rank=LORA.rank):
    torch.manual_seed(seed)
    found = Tensors()
    for name, layer in layers_of(model).items():
        a, b = names_of(name)
        found[a], found[b] = torch.randn(rank, layer.in_features) / 4, torch.randn(layer.out_features, rank) / 4
    return found


def merged(folder, tensors):
    model = plain(folder)
    for name, layer in layers_of(model).items():
        a, b = (tensors[n].double() for n in names_of(name))
        layer.weight.data = (layer.weight.double() + 2.5 * b @ a).float()
    return model


def engine_of(folder):
    return TorchEngine(
        folder, device=torch.device("cpu"), dtype=torch.float32, slots=16, context=64, stop_token_ids=(2,), lora=LORA
    )


def logprob_error(engine, model):
    requests = various(temperature=0.7)
    engine.submit(requests)
    done = drain(engine)
    return max(
        abs(c.logprobs - logprobs_of(model, requests[id].prompt, c.tokens, 0.7)).max() for (id, _), c in done.items()
    )


def test_logprobs_are_those_of_the_merged_weights_version_after_version(folder):
    engine = engine_of(folder)
    for version in range(3):  # each replaces the one before: nothing adds up
        tensors = adapter(plain(folder), seed=version)
        manifest, data = published(tensors, version)
        assert engine.load_weights(manifest, data) == manifest.checksum
        assert logprob_error(engine, merged(folder, tensors)) < 1e-4
    assert logprob_error(engine, plain(folder)) > 0.1


def test_running_samples_go_on_with_the_new_version(folder):
    engine = engine_of(folder)
    engine.load_weights(*published(adapter(plain(folder), seed=0)))
    engine.submit([request(max_new_tokens=20, num_samples=8)])
    for _ in range(3):
        engine.step(0.0)
    engine.load_weights(*published(adapter(plain(folder), seed=1), 1))
    versions = {tuple(dict.fromkeys(c.versions.tolist())) for c in drain(engine).values() if len(c.versions) > 4}
    assert versions == {(0, 1)}


def test_what_is_not_this_adapter_is_refused_and_the_one_before_goes_on(folder):
    engine = engine_of(folder)
    tensors = adapter(plain(folder), seed=0)
    engine.load_weights(*published(tensors))
    lacking = Tensors(tensors)
    lacking.popitem()
    for other in (plain(folder), adapter(plain(folder), seed=1, rank=3), lacking):
        with pytest.raises(WeightsError, match=r"version 1"):
            engine.load_weights(*published(other, 1))
    assert engine.proven
    assert logprob_error(engine, merged(folder, tensors)) < 1e-4
    whole = make(folder)
    with pytest.raises(WeightsError, match="it lacks"):
        whole.load_weights(*published(tensors, 1))


def test_a_changed_byte_and_a_faulty_merge_are_found(folder, monkeypatch):
    engine = engine_of(folder)
    manifest, data = published(adapter(plain(folder), seed=0))
    wrong = bytearray(data)
    wrong[manifest.tensors[3].offset] ^= 1
    with pytest.raises(WeightsError, match=f"the engine holds .*{manifest.tensors[3].name}"):
        engine.load_weights(manifest, memoryview(bytes(wrong)))
    assert not engine.proven
    with monkeypatch.context() as patched:
        patched.setattr(adapter_weights.torch, "addmm", lambda base, b, a, *, alpha, out: out.copy_(base))
        with pytest.raises(WeightsError, match=r"a faulty merge.*layers\.0\.self_attn\.q_proj"):
            engine.load_weights(manifest, data)
    assert not engine.proven
    engine.load_weights(manifest, data)
    assert engine.proven


def test_in_bfloat16_a_change_that_a_merge_would_round_away_is_computed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = nn.Linear(32, 1, bias=False, dtype=torch.bfloat16)

    model, lora = Model(), LoraConfig(rank=1, alpha=1, targets=("q_proj",))
    model.q_proj.weight.data = torch.tensor([[1.0, -1.0] * 16]).bfloat16()
    weights = AdapterWeights(model.requires_grad_(False), lora)
    a, b = torch.ones(1, 32).bfloat16(), torch.full((1, 1), 2.0**-10).bfloat16()
    assert torch.equal(model.q_proj.weight + b @ a, model.q_proj.weight)
    manifest, data = published(Tensors(dict(zip(names_of("q_proj"), (a, b), strict=True))))
    assert weights.load(manifest, data) == manifest.checksum
    assert model.q_proj(torch.ones(1, 32).bfloat16()).item() == 32 * 2.0**-10  # W x is 0
