"""From the configuration to an engine."""

import importlib.util
import json

import pytest

from actors.engines.factory import make_engine
from actors.engines.mock import MockEngine
from async_rl.config import parse_config
from async_rl.errors import ConfigError


def test_the_mock_engine_needs_only_the_models_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50, "eos_token_id": 2}))
    engine = make_engine(parse_config({"actors": {"engine": "mock", "slots": 3}}), tmp_path, "actor0")
    assert isinstance(engine, MockEngine)
    engine.close()


def test_without_vllm_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install async-rl\[vllm\].*install_vllm_cpu\.sh"):
        make_engine(parse_config({"actors": {"engine": "vllm"}}), tmp_path, "actor0")
