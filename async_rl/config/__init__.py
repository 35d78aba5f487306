"""Configuration: TOML in, strict pydantic models out. An unknown key is an error that names the nearest known one.

    preset or file ──► merge --set overrides ──► recipe ──► sections ──► checks ──► resolved config.toml

Nothing here imports torch, so the command line can check a file at once.
"""

from async_rl.config.load import load_config, parse_config, preset_names, to_toml
from async_rl.config.sections import (
    MAX_INT,
    ActorsConfig,
    AlgorithmConfig,
    BufferConfig,
    CheckpointConfig,
    Config,
    EvalConfig,
    LearnerConfig,
    LogConfig,
    ModelConfig,
    ReferenceConfig,
    RewardConfig,
    SamplingConfig,
    TaskConfig,
    WeightsConfig,
)

__all__ = [
    "MAX_INT",
    "ActorsConfig",
    "AlgorithmConfig",
    "BufferConfig",
    "CheckpointConfig",
    "Config",
    "EvalConfig",
    "LearnerConfig",
    "LogConfig",
    "ModelConfig",
    "ReferenceConfig",
    "RewardConfig",
    "SamplingConfig",
    "TaskConfig",
    "WeightsConfig",
    "load_config",
    "parse_config",
    "preset_names",
    "to_toml",
]
