"""The critic: how much reward is still to come, judged before each token (Schulman et al. 2017, arXiv:1707.06347).

    head     policy's last hidden state ──► linear ──► value [N]       one forward pass for both
    model    tokens ──► trunk of its own ──► linear ──► value [N]      the start model less its output layer

Values are float32 and begin at 0, so that the first advantages are the rewards themselves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from learner.batching import MicroBatch
from learner.logprobs import predicting_hidden


class Critic(nn.Module):
    """A linear layer, and a trunk unless it reads the policy's.

    Args:
        hidden_size: of the states that the layer reads.
        trunk: a Hugging Face model whose last hidden states are read; None: those of the policy.
    """

    def __init__(self, hidden_size: int, trunk: nn.Module | None = None) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch, policy_hidden_NH: torch.Tensor) -> torch.Tensor:
        """Values of the states that predict the N targets.

        Args:
            batch: the micro-batch.
            policy_hidden_NH: last hidden states of the policy there; read without a trunk only.

        Returns:
            float32 ``[N]``.
        """
        hidden_NH = policy_hidden_NH
        if self.trunk is not None:
            hidden_NH = predicting_hidden(
                self.trunk, batch.inputs_RL, batch.source_N, batch.positions_RL, batch.visible_RLL
            )
        return F.linear(hidden_NH.float(), self.head.weight.float(), self.head.bias.float()).squeeze(-1)
