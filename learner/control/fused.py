"""An MLP that passes a block of rows through all layers, forward and back: on a CPU, memory bounds small networks.

x [m, D], a block at a time ─► linear, activation, ... ─► out [m, O]        gradients of a block: backwards, added up

The same numbers as ``nn.Sequential`` and autograd, up to the order of sums. Observations get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from async_rl.control.networks import Actor, Critic

BLOCK = 2048
"""Rows of a block: a layer of 64 in float32 has 512 KiB."""


@dataclass(frozen=True, slots=True)
class _Activation:
    """An activation whose derivative follows from its output."""

    apply: Callable[[torch.Tensor], Any]
    """h to f(h), in place."""
    chain: Callable[[torch.Tensor, torch.Tensor], Any]
    """(gradient of f, f) to the gradient of h, in place of the first."""


def _elu_chain(alpha: float, scale: float) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    return lambda g, f: torch.ops.aten.elu_backward.grad_input(g, alpha, scale, 1.0, True, f, grad_input=g)


_SELU = 1.6732632423543772, 1.0507009873554805  # alpha and scale of Klambauer et al. 2017
_ACTIVATIONS: dict[type[nn.Module], _Activation] = {
    nn.ELU: _Activation(lambda h: functional.elu(h, inplace=True), _elu_chain(1.0, 1.0)),
    nn.SELU: _Activation(lambda h: functional.selu(h, inplace=True), _elu_chain(*_SELU)),
    nn.ReLU: _Activation(
        lambda h: h.clamp_min_(0.0),
        lambda g, f: torch.ops.aten.threshold_backward.grad_input(g, f, 0.0, grad_input=g),
    ),
    nn.Tanh: _Activation(lambda h: h.tanh_(), lambda g, f: torch.ops.aten.tanh_backward.grad_input(g, f, grad_input=g)),
}


def fuse(network: Actor | Critic) -> FusedMlp | None:
    """Encoder and head of a network as one, from normalised x to the head's outputs.

    Returns:
        None where that is not possible (recurrence, no encoder of its own, another activation) or does not gain (CUDA).
    """
    encoder = network.encoder
    if encoder is None or encoder.rnn is not None or network.head.weight.device.type != "cpu":
        return None
    layers = [*encoder.mlp, network.head]
    activations = {type(layer) for layer in layers[1::2]}
    if len(activations) > 1 or not activations <= _ACTIVATIONS.keys():
        return None
    return FusedMlp(layers)


class FusedMlp:
    """Linear layers of a network with one activation between them.

    Args:
        layers: ``nn.Linear``, activation, ..., ``nn.Linear``.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
        kinds = {type(layer) for layer in layers if not isinstance(layer, nn.Linear)}
        self._activation = _ACTIVATIONS[kinds.pop()] if kinds else None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Weight and bias of each layer."""
        return [tensor for linear in self.linears for tensor in (linear.weight, linear.bias)]

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [m, O] of rows [m, D], without gradients."""
        out = self.linears[-1].weight.new_empty(len(x), self.linears[-1].out_features)
        hidden = self.new_hidden()
        for start in range(0, len(x), BLOCK):
            rows = slice(start, start + BLOCK)
            self.forward(x[rows], hidden, out[rows])
        return out

    def new_hidden(self) -> list[torch.Tensor]:
        """Memory for a block of the hidden layers [BLOCK, width]."""
        return [linear.weight.new_empty(BLOCK, linear.out_features) for linear in self.linears[:-1]]

    def new_gradients(self) -> list[LinearGradient]:
        """Zero gradients of all layers."""
        return [LinearGradient(linear.weight) for linear in self.linears]

    @torch.no_grad()
    def forward(self, x: torch.Tensor, hidden: Sequence[torch.Tensor], out: torch.Tensor) -> list[torch.Tensor]:
        """Fill ``hidden`` and ``out`` for a block x [b, D]; returns the inputs of all layers, for :meth:`backward`."""
        inputs = [x]
        for linear, memory in zip(self.linears, (*hidden, out), strict=True):
            h = torch.addmm(linear.bias, inputs[-1], linear.weight.t(), out=memory[: len(x)])
            if memory is not out and self._activation is not None:
                self._activation.apply(h)
            inputs.append(h)
        return inputs[:-1]

    @torch.no_grad()
    def backward(self, g: torch.Tensor, inputs: Sequence[torch.Tensor], gradients: Sequence[LinearGradient]) -> None:
        """Add a block's gradients, given g [b, O] of its outputs and what :meth:`forward` returned."""
        for layer in range(len(inputs) - 1, -1, -1):
            gradients[layer].add(g, inputs[layer])
            if layer and self._activation is not None:
                g = torch.mm(g, self.linears[layer].weight)
                self._activation.chain(g, inputs[layer])


class LinearGradient:
    """Gradients of a layer [O, I], added up over blocks.

    The shorter side of the weight comes first in memory: the product is several times faster so.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        outputs, inputs = weight.shape
        self._turned = inputs < outputs
        self._sum = weight.new_zeros((inputs, outputs) if self._turned else (outputs, inputs))
        self.bias = weight.new_zeros(outputs)

    @property
    def weight(self) -> torch.Tensor:
        """Of the weight, [O, I]."""
        return self._sum.t() if self._turned else self._sum

    def add(self, g: torch.Tensor, h: torch.Tensor) -> None:
        """Add gᵀ h, and the sum of g, of gradients [m, O] and inputs [m, I]."""
        if self._turned:
            self._sum.addmm_(h.t(), g)
        else:
            self._sum.addmm_(g.t(), h)
        self.bias.add_(g.sum(0))
