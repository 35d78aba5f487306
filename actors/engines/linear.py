"""Linear layers of a model on the CPU by oneDNN: on AVX-512 it is twice as fast as what torch takes for float32.

Weights stay where they are and as they are, so that a new version is seen at once. Other devices and types keep torch's
own choice.
"""

from __future__ import annotations

from functools import partial

import torch

ROWS = 16
"""oneDNN compiles a program for each number of rows that it meets: only multiples of this are given to it, ..."""
_STEPS = 8
"""... and from one power of two to the next only so many different ones."""
_FEWEST_ROWS = 32
"""With fewer rows oneDNN takes longer to begin than it gains."""


def use_onednn(model: torch.nn.Module) -> bool:
    """Let all linear layers of a float32 model on the CPU use oneDNN where it is faster.

    Returns:
        Whether they do: then rows are best padded as :func:`padded` says.
    """
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
        return False
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = partial(linear, module)
    return True


def padded(rows: int) -> int:
    """The number of rows to compute in place of ``rows``."""
    step = max(ROWS, (1 << rows.bit_length()) // (2 * _STEPS))
    return -(-rows // step) * step if rows > _FEWEST_ROWS else rows


def linear(module: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    """``inputs`` [..., in] through the layer, [..., out]; float32 arithmetic as in torch, summed in another order."""
    rows = inputs.numel() // module.in_features
    if rows < _FEWEST_ROWS or rows % ROWS:
        return torch.nn.functional.linear(inputs, module.weight, module.bias)
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, module.weight, module.bias, "none", [], "")
    return output
