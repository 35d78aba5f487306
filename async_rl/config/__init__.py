"""Configuration: TOML in, strict pydantic models out. An unknown key is an error that names the nearest known one.

    preset or file ──► merge --set overrides ──► recipe ──► sections ──► checks ──► resolved config.toml

Nothing here imports torch, so the command line can check a file at once.
"""

from async_rl.config.base import (
    MAX_INT,
    BufferConfig,
    CheckpointConfig,
    LogConfig,
    RunConfig,
    WeightsConfig,
)
from async_rl.config.control import ControlConfig
from async_rl.config.load import (
    AnyConfig,
    load_any,
    load_config,
    load_control,
    parse_config,
    parse_control,
    preset_names,
    to_toml,
)
from async_rl.config.sections import (
    ActorsConfig,
    AlgorithmConfig,
    Config,
    EvalConfig,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    ReferenceConfig,
    RewardConfig,
    SamplingConfig,
    TaskConfig,
)

__all__ = [
    "MAX_INT",
    "ActorsConfig",
    "AlgorithmConfig",
    "AnyConfig",
    "BufferConfig",
    "CheckpointConfig",
    "Config",
    "ControlConfig",
    "EvalConfig",
    "LearnerConfig",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RunConfig",
    "SamplingConfig",
    "TaskConfig",
    "WeightsConfig",
    "load_any",
    "load_config",
    "load_control",
    "parse_config",
    "parse_control",
    "preset_names",
    "to_toml",
]
