"""Is a step's outcome what the environment promised? Tensors of other shapes would spread over rows without a word.

Step ─► shapes and dtypes of the spaces ─► finite numbers ─► nothing, or a sentence
"""

from __future__ import annotations

import math

import torch

from actors.control.environments.base import Environment, Step


def what_does_not_fit(step: Step, environment: Environment) -> str:
    """Which array is missing, or of another shape or dtype than the spaces say, as a sentence; empty: all fit.

    No number is looked at, so that nothing waits for a device.
    """
    rows = (environment.num_envs,)
    expected: list[tuple[str, torch.Tensor | None, tuple[int, ...], str]] = [
        ("rewards", step.rewards, rows, "float32"),
        ("terminated", step.terminated, rows, "bool"),
        ("truncated", step.truncated, rows, "bool"),
    ]
    for name, space in environment.spaces.observations.items():
        what = f"observations of group {name!r}"
        expected.append((what, step.observations.get(name), (*rows, *space.shape), space.dtype))
        if step.final_observations is not None:
            final = step.final_observations.get(name)
            some = (0 if final is None else len(final), *space.shape)
            expected.append((f"final {what}", final, some, space.dtype))
    for what, array, shape, dtype in expected:
        if array is None:
            return f"{what} are missing"
        if array.shape != shape or array.dtype != getattr(torch, dtype):
            found = f"{list(array.shape)} of {str(array.dtype).removeprefix('torch.')}"
            return f"{what} are {found} instead of {list(shape)} of {dtype}"
    return ""


def what_is_not_finite(step: Step) -> str:
    """Which number of a step's outcome is none, as a sentence; empty: all are finite.

    A sum is finite only if each of its numbers is, so that one comparison (and one wait for the device) is enough.
    """
    arrays = {"rewards": step.rewards}
    arrays |= {f"observations of group {name!r}": array for name, array in step.observations.items()}
    if step.final_observations is not None:
        arrays |= {f"final observations of group {n!r}": array for n, array in step.final_observations.items()}
    floats = {name: array for name, array in arrays.items() if array.is_floating_point() and array.numel()}
    total = torch.stack([array.sum() for array in floats.values()]).sum() if len(floats) > 1 else step.rewards.sum()
    if math.isfinite(float(total)):
        return ""
    for name, array in floats.items():
        index = (~torch.isfinite(array)).nonzero()
        if len(index):
            where = index[0].tolist()
            return f"{name}, index {where}, is {float(array[tuple(where)])}"
    return ""  # finite numbers whose sum is not
