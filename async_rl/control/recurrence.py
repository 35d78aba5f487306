"""GRU and LSTM over many environments whose episodes begin at different steps.

x [T, N, D], state, resets [T, N] ─► run_sequence ─► hidden [T, N, H], state        the same as T times run_step
"""

from __future__ import annotations

import torch
from torch import nn

State = tuple[torch.Tensor, ...]
"""Each [L, N, H]: hidden state, and the cell of an LSTM; () without recurrence."""


def reset_state(state: State, mask: torch.Tensor) -> State:
    """The state with zeros where ``mask`` [N]; no gradient flows through those."""
    return tuple(part.masked_fill(mask.unsqueeze(-1), 0.0) for part in state)


def run_step(rnn: nn.GRU | nn.LSTM, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
    """One step: x [N, D] to hidden [N, H] and the state after it."""
    hidden, state = _run(rnn, x.unsqueeze(0), state)
    return hidden.squeeze(0), state


def run_sequence(
    rnn: nn.GRU | nn.LSTM, x: torch.Tensor, state: State, resets: torch.Tensor
) -> tuple[torch.Tensor, State]:
    """T steps, one fused call per run of steps in which no episode begins.

    Args:
        rnn: the layer.
        x: [T, N, D]
        state: before the first step.
        resets: bool [T, N], an episode begins with this step.

    Returns:
        Hidden [T, N, H] and the state after the last step.
    """
    starts = [0, *(resets[1:].any(1).nonzero().squeeze(1) + 1).tolist()]
    outputs = []
    for start, stop in zip(starts, [*starts[1:], x.shape[0]], strict=True):
        hidden, state = _run(rnn, x[start:stop], reset_state(state, resets[start]))
        outputs.append(hidden)
    return torch.cat(outputs), state


def _run(rnn: nn.GRU | nn.LSTM, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
    """Call it on [T, N, D] , with the state as a tuple for both kinds."""
    if isinstance(rnn, nn.LSTM):
        hidden, (state_h, state_c) = rnn(x, (state[0], state[1]))
        return hidden, (state_h, state_c)
    hidden, state_h = rnn(x, state[0])
    return hidden, (state_h,)
