"""The settings that all ranks of a learner group must share, in a form that can be sent and compared. Pure."""

from __future__ import annotations

import json

from async_rl.config.base import RunConfig

_OF_A_HOST = (
    *("buffer.bind", "buffer.insecure", "buffer.keys", "weights.trusted_network"),
    *("log.wandb", "log.wandb_project", "log.tensorboard"),
)
"""What may differ between hosts: none of it changes an update."""


def shared_settings(config: RunConfig) -> dict[str, str]:
    """Values as JSON, by key (``learner.lr``)."""
    found: dict[str, str] = {}
    for name, value in config.model_dump(mode="json").items():
        parts = {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        found |= {key: json.dumps(part, sort_keys=True) for key, part in parts.items() if key not in _OF_A_HOST}
    return found
