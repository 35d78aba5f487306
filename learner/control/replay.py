"""The newest transitions of the policy on this rank, in a ring of fixed size on its device.

It is this rank's own; a checkpoint has that of rank 0, with which every rank goes on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class TransitionReplay:
    """Ring of pairs of states.

    Args:
        capacity: pairs that are kept.
        width: D of a state.
        device: where they lie.
    """

    def __init__(self, capacity: int, width: int, device: torch.device) -> None:
        self._pairs = torch.zeros((capacity, 2, width), dtype=torch.float32, device=device)
        self._next = 0
        self._filled = 0

    def __len__(self) -> int:
        return self._filled

    def push(self, states: torch.Tensor, next_states: torch.Tensor) -> None:
        """Put pairs [n, D] in over the oldest ones; of more than fit, the last are kept."""
        capacity = len(self._pairs)
        states, next_states = states[-capacity:], next_states[-capacity:]
        count = len(states)
        slots = (torch.arange(count, device=self._pairs.device) + self._next) % capacity
        self._pairs[slots] = torch.stack((states, next_states), dim=1)
        self._next = (self._next + count) % capacity
        self._filled = min(self._filled + count, capacity)

    def sample(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw pairs [count, D] uniformly, with repetition; which ones does not depend on where the ring begins.

        Args:
            count: how many.
            generator: of the same device.

        Raises:
            ValueError: nothing was put in yet.
        """
        if self._filled == 0:
            raise ValueError("an empty replay has nothing to draw")
        oldest = self._next - self._filled
        rows = torch.randint(self._filled, (count,), generator=generator, device=self._pairs.device)
        drawn = self._pairs[(rows + oldest) % len(self._pairs)]
        return drawn[:, 0], drawn[:, 1]

    def state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint: ``pairs`` [n, 2, D] of states and next states, the oldest first."""
        ages = torch.arange(self._filled, device=self._pairs.device) + (self._next - self._filled)
        return {"pairs": self._pairs[ages % len(self._pairs)]}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from :meth:`state`, of a replay of any capacity.

        Raises:
            KeyError, ValueError: it is none of pairs of such states.
        """
        pairs = state["pairs"]
        if pairs.shape[1:] != self._pairs.shape[1:]:
            raise ValueError(f"pairs is {list(pairs.shape)}, not [n, 2, {self._pairs.shape[2]}]")
        self._next = self._filled = 0
        self.push(*pairs.to(self._pairs.device).unbind(1))
