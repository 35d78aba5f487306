"""A run with an adapter before and beside the learner: settings, names, its base, and who is let in."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import save_file
from server_helpers import WAIT_S, config, running

from async_rl.adapter import pairs, published_name
from async_rl.base_checksum import base_checksum, base_of
from async_rl.buffer.records import Limits
from async_rl.client import Client
from async_rl.config import load_config, parse_config, to_toml
from async_rl.errors import ConfigError, HandshakeError, WeightsError
from async_rl.launch.overview import overview
from async_rl.launch.token_checks import check_adapter
from async_rl.weights.manifest import Manifest, Tensor, combine

ADAPTER = {"lora": {"rank": 4, "targets": ["q_proj"]}}


def model_folder(folder, files, **settings):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "rope_theta": 1e4, **settings}))
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    return folder


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {"a.q_proj.weight": torch.randn(6, 4), "b": torch.randn(3)}


# ---------------------------------------------------------------- settings


def test_without_a_rank_there_is_no_adapter_and_the_contract_is_the_old_one():
    assert not parse_config({}).lora.is_on
    assert "lora" not in parse_config({}).contract()
    assert "alpha" not in to_toml(parse_config({}))
    with pytest.raises(ConfigError, match=r"lora\.alpha = 64 has no effect with lora\.rank = 0"):
        parse_config({"lora": {"alpha": 64}})


def test_an_adapter_is_part_of_the_contract_and_survives_the_file(tmp_path):
    settings = parse_config({"lora": {"rank": 8, "alpha": 24, "targets": ["v_proj"]}})
    assert settings.lora.scale == 3.0
    (tmp_path / "config.toml").write_text(to_toml(settings))
    assert load_config(str(tmp_path / "config.toml")) == settings
    others = [{"rank": 8}, {"rank": 8, "alpha": 24}, {"rank": 4, "alpha": 24, "targets": ["v_proj"]}]
    hashes = {parse_config({"lora": other}).contract_hash() for other in others}
    assert len(hashes | {settings.contract_hash(), parse_config({}).contract_hash()}) == 5


def test_a_critic_that_is_a_whole_model_beside_an_adapter_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.critic = 'model' with lora\.rank = 4.* set algorithm\.critic"):
        parse_config({**ADAPTER, "algorithm": {"name": "ppo", "critic": "model"}})


def test_the_overview_counts_the_bytes_of_the_adapter(tmp_path, tensors):
    model_folder(tmp_path / "m", {"model.safetensors": tensors})
    assert (
        overview(parse_config(ADAPTER), tmp_path / "m").weight_bytes == 4 * (6 + 4) * 4
    )  # rank · (out + in) · float32
    assert overview(parse_config({}), tmp_path / "m").weight_bytes == (6 * 4 + 3) * 4


def test_without_peft_a_run_with_an_adapter_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"lora\.rank = 4, but peft is not installed .*; `pip install 'async-rl\[lora\]"
    ):
        check_adapter(parse_config(ADAPTER))
    check_adapter(parse_config({}))


# ---------------------------------------------------------------- names


def test_names_in_the_learner_become_names_of_peft():
    a = "model.layers.0.self_attn.q_proj.lora_A"
    assert published_name(f"{a}.default.weight") == f"{a}.weight"
    assert published_name("model.default.weight") == "model.default.weight"


def adapter_manifest(*tensors):
    nbytes = sum(t.nbytes for t in tensors)
    return Manifest(
        version=0,
        run_id="r",
        tensors=tensors,
        nbytes=nbytes,
        chunk_bytes=1 << 20,
        chunks=(1,),
        checksum=combine((1,)),
        segment="",
        host="",
    )


def test_a_version_is_made_of_pairs_of_the_rank():
    a, b = Tensor("m.q.lora_A.weight", "float32", (2, 5), 0), Tensor("m.q.lora_B.weight", "float32", (3, 2), 40)
    (pair,) = pairs(adapter_manifest(b, a), 2)
    assert (pair.module, pair.a, pair.b) == ("m.q", a, b)
    with pytest.raises(WeightsError, match=r"of m\.q is no pair \[3, in\], \[out, 3\]"):
        pairs(adapter_manifest(a, b), 3)
    whole = Tensor("m.q.weight", "float32", (3, 5), 0)
    for wrong in ((a,), (whole,), (a, b, whole), (a, Tensor("m.k.lora_B.weight", "float32", (3, 2), 40))):
        with pytest.raises(WeightsError, match=r"no adapter|no pair"):
            pairs(adapter_manifest(*wrong), 2)


# ---------------------------------------------------------------- the base


def test_the_checksum_of_a_base_is_that_of_its_tensors_in_whatever_files(tmp_path, tensors):
    whole = model_folder(tmp_path / "whole", {"model.safetensors": tensors}, transformers_version="5.1")
    parts = {f"model-{i}.safetensors": {name: tensors[name]} for i, name in enumerate(reversed(tensors))}
    assert base_checksum(whole) == base_checksum(model_folder(tmp_path / "parts", parts, dtype="float32"))


def test_any_other_bit_name_type_or_setting_gives_another_checksum(tmp_path, tensors):
    flipped = {**tensors, "b": tensors["b"].clone()}
    flipped["b"].view(torch.int32)[1] ^= 1
    renamed = {"a.k_proj.weight": tensors["a.q_proj.weight"], "b": tensors["b"]}
    bytes_alike = {**tensors, "b": tensors["b"].view(torch.int32)}
    variants = [(tensors, {}), (flipped, {}), (renamed, {}), (bytes_alike, {}), (tensors, {"rope_theta": 2e4})]
    folders = [
        model_folder(tmp_path / str(i), {"model.safetensors": t}, **settings)
        for i, (t, settings) in enumerate(variants)
    ]
    assert len({base_checksum(folder) for folder in folders}) == len(variants)


def test_a_folder_without_weights_is_no_base(tmp_path):
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        base_checksum(model_folder(tmp_path / "m", {}))
    with pytest.raises(ConfigError, match=r"config\.json' cannot be read|config\.json cannot be read"):
        base_checksum(tmp_path / "nowhere")


def test_only_runs_with_an_adapter_read_their_base(tmp_path, tensors):
    folder = model_folder(tmp_path / "m", {"model.safetensors": tensors})
    assert base_of(parse_config({"model": {"path": str(tmp_path / "nowhere")}})) == ""
    assert base_of(parse_config({**ADAPTER, "model": {"path": str(folder)}})) == base_checksum(folder)


def test_an_actor_with_another_base_is_refused_and_one_with_the_same_is_not(tmp_path):
    settings = config(**ADAPTER)
    with running(settings, tmp_path, limits=Limits(num_tasks=4, base="ours")) as server:

        def client(role, name, base):
            return Client(server.address, role, name, settings.contract_hash(), base=base)

        for base in ("theirs", ""):
            with client("actor", "a", base) as actor, pytest.raises(HandshakeError, match="copy the folder"):
                actor.connect(WAIT_S)
        with client("learner", "l", "theirs") as learner, pytest.raises(HandshakeError, match="checksum 'theirs'"):
            learner.connect(WAIT_S)
        with client("actor", "a", "ours") as actor, client("monitor", "m", "") as monitor:
            assert actor.connect(WAIT_S)["run_id"] == monitor.connect(WAIT_S)["run_id"]
