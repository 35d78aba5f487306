"""A plain multilayer perceptron, for the networks that only the learner has."""

from __future__ import annotations

from torch import nn

from async_rl.control.networks import make_activation


def make_mlp(size: int, hidden: tuple[int, ...], outputs: int, activation: str) -> nn.Sequential:
    """Linear layers with activations between them.

    Args:
        size: numbers of the input.
        hidden: widths of the hidden layers.
        outputs: numbers of the output.
        activation: as ``policy.activation``.
    """
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(size, width), make_activation(activation)]
        size = width
    return nn.Sequential(*layers, nn.Linear(size, outputs))
