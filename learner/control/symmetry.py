"""Mirror images of observations and actions: as more data, or as a loss between what the policy does in both.

    function(obs, actions) ─► originals first, then their mirror images ─┬─► augment      more samples for PPO
                                                                         └─► mirror_loss  mean action of the image

Mittal et al. 2024, "Symmetry Considerations for Learning Task Symmetric Robot Policies", arXiv:2403.04359.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from async_rl.config import ControlConfig
from async_rl.control.spaces import Observation, Spaces
from async_rl.errors import ConfigError

if TYPE_CHECKING:
    from async_rl.control.networks import Actor

Observations = dict[str, torch.Tensor]
Mirror = Callable[
    [Observations | None, torch.Tensor | None],
    tuple[Mapping[str, torch.Tensor] | None, torch.Tensor | None],
]
"""``f(observations, actions)``: rows [m, ...] in, rows [k·m, ...] out, the originals first; None stays None."""

_ROWS = 5
"""Random samples that a function is tried with."""
_ACTIONS = "(actions)"  # no name of an observation group


class Symmetry:
    """The symmetries of an environment, through a function that the configuration names.

    Args:
        config: of the run.
        spaces: of the environment.

    Raises:
        ConfigError: the function cannot be imported, does not do what is asked of it on random input, or the mirror
            loss is asked for with discrete actions, which have no mean.
    """

    def __init__(self, config: ControlConfig, spaces: Spaces) -> None:
        self._name = config.symmetry.function
        self.augments = config.symmetry.augment
        self.mirror_coef = config.symmetry.mirror_coef
        if self.mirror_coef > 0 and spaces.action.kind == "discrete":
            raise ConfigError(
                f"symmetry.mirror_coef = {self.mirror_coef} needs continuous actions, whose means can be mirrored; set "
                "symmetry.augment = true instead"
            )
        self._mirror = _load(self._name)
        self.images = self._check(spaces)

    images: int
    """k: the original and its mirror images."""

    def augment(
        self, obs: Mapping[str, torch.Tensor], actions: torch.Tensor
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """Observations [k·m, ...] and actions [k·m, A]: the originals first.

        What belongs to a sample (old log-probability, advantage, return, old value) is the same for its mirror images;
        KL and entropy are those of the originals alone.
        """
        mirrored, turned = self._mirror(dict(obs), actions)
        assert mirrored is not None
        assert turned is not None
        return mirrored, turned

    def mirror_observations(self, obs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Observations [k·m, ...]: the originals first."""
        mirrored, _ = self._mirror(dict(obs), None)
        assert mirrored is not None
        return mirrored

    def mirror_loss(self, actor: Actor, obs: Mapping[str, torch.Tensor], count: int) -> torch.Tensor:
        """Mirror loss of this rank's samples; one more pass through the actor.

        Args:
            actor: without recurrence.
            obs: of this rank's samples [m, ...].
            count: samples over all ranks.
        """
        x = actor.observe(self.mirror_observations(obs))
        features, _ = actor.step(x, actor.initial_state(len(x), x.device))
        return self.mirror_loss_of(actor.distribution(features).mode(), count)

    def mirror_loss_of(self, means: torch.Tensor, count: int) -> torch.Tensor:
        """Mean squared difference between the mirrored mean action and the mean action of the mirrored observation.

        L = Σ |μ(mirror(o)) - stop(mirror(μ(o)))|² / (count · (k - 1) · A): the mirror images follow the originals.

        Args:
            means: [k·m, A], of the originals first, then of their mirror images, as the policy has them now.
            count: samples over all ranks, mirror images not counted.
        """
        originals = len(means) // self.images
        with torch.no_grad():
            _, turned = self._mirror(None, means[:originals])
            assert turned is not None
        difference = means[originals:] - turned[originals:]
        return difference.square().sum() / (count * (self.images - 1) * means.shape[-1])

    def _check(self, spaces: Spaces) -> int:
        """Try the function on random rows and return k."""
        generator = torch.Generator().manual_seed(0)
        rows = {name: _random_rows(space, generator) for name, space in spaces.observations.items()}
        rows[_ACTIONS] = _random_actions(spaces, generator)
        mirrored = self._try(rows)
        images, rest = divmod(len(mirrored[_ACTIONS]), _ROWS)
        if rest or images < 2:
            raise self._wrong(f"makes {len(mirrored[_ACTIONS])} rows of {_ROWS}; mirror images follow the originals")
        self._compare(rows, _image(mirrored, 0), "changes the originals, which come first")
        obs = {name: array for name, array in rows.items() if name != _ACTIONS}
        self._compare(self._try(obs), mirrored, "gives other observations when actions are None")
        self._compare(self._try({_ACTIONS: rows[_ACTIONS]}), mirrored, "gives other actions when observations are None")
        for image in range(1, images):
            again = self._try(_image(mirrored, image))
            if not any(not _differing(rows, _image(again, back)) for back in range(images)):
                raise self._wrong(f"does not give the original back when it is applied to mirror image {image}")
        return images

    def _try(self, rows: Observations) -> Observations:
        """Apply the function to copies of observations, actions or both; check kinds, names and shapes."""
        obs = {name: array.clone() for name, array in rows.items() if name != _ACTIONS} or None
        try:
            mirrored, turned = self._mirror(obs, rows[_ACTIONS].clone() if _ACTIONS in rows else None)
        except Exception as error:  # the user's code: whatever it raises is one sentence
            raise self._wrong(f"fails on random input ({', '.join(rows)}): {error!r}") from error
        found = dict(mirrored or {}) | ({} if turned is None else {_ACTIONS: turned})
        if set(found) != set(rows):
            raise self._wrong(f"is given {', '.join(rows)} and returns {', '.join(found) or 'nothing'}")
        length = len(next(iter(found.values())))
        for name, array in found.items():
            shape = [length, *rows[name].shape[1:]]
            if array.dtype != rows[name].dtype or list(array.shape) != shape:
                raise self._wrong(
                    f"makes {name} {list(array.shape)} of {array.dtype}; it should be {shape} of {rows[name].dtype}"
                )
        return found

    def _compare(self, expected: Observations, got: Observations, problem: str) -> None:
        differing = _differing(expected, got)
        if differing:
            raise self._wrong(f"{problem}: {', '.join(differing)}")

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"symmetry.function = {self._name!r} {problem}")


def _load(name: str) -> Mirror:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ConfigError(f"symmetry.function = {name!r} is no module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"symmetry.function = {name!r} cannot be imported: {error}") from None
    if not callable(found):
        raise ConfigError(f"symmetry.function = {name!r} is no function")
    return found


def _random_rows(space: Observation, generator: torch.Generator) -> torch.Tensor:
    shape = (_ROWS, *space.shape)
    if space.dtype == "float32":
        return torch.randn(shape, generator=generator)
    dtype = torch.uint8 if space.dtype == "uint8" else torch.int32
    return torch.randint(0, 2, shape, generator=generator, dtype=dtype)


def _random_actions(spaces: Spaces, generator: torch.Generator) -> torch.Tensor:
    """float32 [rows, A], or int64 as the learner has them."""
    action = spaces.action
    if action.kind == "continuous":
        return torch.randn((_ROWS, action.size), generator=generator)
    choices = torch.tensor(action.choices, dtype=torch.float64)
    return (torch.rand((_ROWS, action.size), generator=generator, dtype=torch.float64) * choices).long()


def _image(rows: Observations, image: int) -> Observations:
    """One of the images, as many rows as the function was given; the originals are image 0."""
    return {name: array[image * _ROWS : (image + 1) * _ROWS] for name, array in rows.items()}


def _differing(expected: Observations, got: Observations) -> list[str]:
    """Which arrays are not those of ``expected`` but for rounding."""

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5)

    return [name for name, array in expected.items() if not same(array, got[name])]
