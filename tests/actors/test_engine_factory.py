"""From the configuration to an engine."""

import importlib.util
import json

import pytest

from actors.engines import vllm_engine
from actors.engines.factory import make_engine
from actors.engines.mock import MockEngine
from async_rl.config import parse_config
from async_rl.errors import ConfigError


def test_the_mock_engine_needs_only_the_models_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50, "eos_token_id": 2}))
    engine = make_engine(parse_config({"actors": {"engine": "mock", "slots": 3}}), tmp_path, "actor0")
    assert isinstance(engine, MockEngine)
    engine.close()


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_vllm_can_sleep_where_it_takes_turns_with_the_learner(tmp_path, monkeypatch, placement):
    fields = {"model_type": "qwen2", "vocab_size": 50, "eos_token_id": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(vllm_engine, "VLLMEngine", lambda path, **settings: settings)
    actors = {"engine": "vllm", "placement": placement, "slots": 3}
    config = parse_config({"actors": actors, "buffer": {"max_staleness": 0}})
    settings = make_engine(config, tmp_path, "actor0")
    assert settings["sleep_mode"] == (placement == "colocated")
    assert (settings["max_num_seqs"], settings["context"], settings["stop_token_ids"]) == (3, 64, (2,))


def test_without_vllm_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install async-rl\[vllm\].*install_vllm_cpu\.sh"):
        make_engine(parse_config({"actors": {"engine": "vllm"}}), tmp_path, "actor0")
