"""How a rank's batch is split into mini-batches: one random split per step, which all epochs go through.

acted [T, N] ─┬─► split_samples:      samples in any order
              └─► split_environments: whole environments, for recurrent policies
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from async_rl.errors import AsyncRLError


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank has of one mini-batch."""

    index: torch.Tensor
    """int64 [m]: positions of its samples in the flattened [T·N]; possibly none."""
    envs: torch.Tensor | None = None
    """int64 [n], recurrent: its environments."""
    within: torch.Tensor | None = None
    """int64 [m], recurrent: positions of its samples in the flattened [T·n] of these environments."""


def step_generator(seed: int, step: int, rank: int) -> torch.Generator:
    """Random numbers of one step on one rank; on the CPU, so that they do not depend on the device."""
    (state,) = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state) >> 1)


def split_samples(acted: torch.Tensor, num_parts: int, generator: torch.Generator) -> list[Share]:
    """Split what counts of [T, N] into parts of equal size, up to one sample, at random."""
    positions = acted.flatten().nonzero().squeeze(1)
    shuffled = positions[torch.randperm(len(positions), generator=generator).to(acted.device)]
    return [Share(index=part) for part in shuffled.tensor_split(num_parts)]


def split_environments(acted: torch.Tensor, num_parts: int, generator: torch.Generator) -> list[Share]:
    """Split the environments of [T, N] into parts of equal size, up to one, at random; T stays whole."""
    num_envs = acted.shape[1]
    order = torch.randperm(num_envs, generator=generator).to(acted.device)
    shares = []
    for envs in order.tensor_split(num_parts):
        steps, column = acted[:, envs].nonzero(as_tuple=True)
        shares.append(Share(index=steps * num_envs + envs[column], envs=envs, within=steps * len(envs) + column))
    return shares


def sizes(shares: Sequence[Share]) -> torch.Tensor:
    """Samples of each, float64 [len(shares)]."""
    return torch.tensor([len(share.index) for share in shares], dtype=torch.float64)


def filled(counts: torch.Tensor) -> list[float]:
    """The samples of each mini-batch over all ranks, of which none is empty.

    Raises:
        AsyncRLError: an update would have nothing to learn from, and would move the parameters all the same.
    """
    found: list[float] = counts.tolist()
    if min(found) < 1:
        raise AsyncRLError(
            f"{sum(found):.0f} samples do not fill {len(found)} mini-batches: lower algorithm.minibatches, or raise "
            "env.num_envs, env.horizon or buffer.groups_per_step"
        )
    return found
