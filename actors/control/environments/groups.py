"""What all adapters do with observation groups: the name of a lone one, and whether all environments see the same."""

from __future__ import annotations

import torch

from actors.control.environments.base import Observations
from async_rl.errors import ConfigError

LONE = "policy"
"""Name of the group of observations that are no dictionary, as in rsl_rl."""


def check_alike(observations: Observations, what: str) -> None:
    """Refuse first observations that are not the same in all environments.

    Args:
        observations: by group, [N, ...].
        what: name of the environment, for the message.

    Raises:
        ConfigError: names the group.
    """
    for name, values in observations.items():
        if not torch.equal(values, values[:1].expand_as(values)):
            raise ConfigError(
                f"env.id: {what} does not start alike: with one seed for all environments, the first observations of "
                f"group {name!r} differ; algorithm.name = 'grpo' needs starts that follow from the seed alone"
            )
