"""One rank that trains a policy for an environment, started by torchrun.

torchrun --nproc-per-node N -m learner.control.main CONFIG.toml --out DIR --connect ADDRESS

What a rank does from its start to its end is in :mod:`learner.rank`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from async_rl.config import ControlConfig, load_control
from async_rl.control.spaces import FILE, Spaces
from async_rl.process import leave, run_guarded
from learner.control.domain import ControlDomain, make_method
from learner.rank import Rank, main


def build(config: ControlConfig, rank: Rank) -> ControlDomain:
    """Make the networks for the environment that the launcher looked at; rank 0's parameters will win.

    Raises:
        ConfigError: there is no ``spaces.json``, or the networks do not fit it.
    """
    spaces = Spaces.read(Path(config.env.spaces) if config.env.spaces else rank.out / FILE)
    torch.manual_seed(config.seed)
    method = make_method(config, spaces, rank.group, fresh=rank.resume is None)
    return ControlDomain(config, spaces, method, rank.group, rank.timer)


if __name__ == "__main__":
    run_guarded(lambda: main(load_control, build))
    leave()
