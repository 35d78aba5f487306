"""What an environment offers and takes: observation groups and actions, as plain values that travel as JSON.

environment ──probe──► Spaces ──spaces.json──► server (checks fragments), learner and actors (build networks)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from async_rl.errors import ConfigError

FILE = "spaces.json"
"""Its name in a run folder."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One observation group."""

    shape: tuple[int, ...]
    """Without the environment axis."""
    dtype: Literal["float32", "uint8", "int32"] = "float32"
    """``uint8`` for images, ``int32`` for tokens of an instruction."""

    @property
    def size(self) -> int:
        """Numbers of one observation."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the policy decides in one step: real numbers (Gaussian), or one choice out of ``choices[i]`` for each i."""

    kind: Literal["continuous", "discrete"]
    size: int
    """Numbers A of an action: ``actions`` is float32 [.., A] or int32 [.., A]."""
    choices: tuple[int, ...] = ()
    """``discrete``: number of choices of each of the A parts."""
    low: tuple[float, ...] = ()
    """``continuous``: bounds that the environment clips to; infinite where there are none. The policy has none."""
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spaces:
    """Observation groups by name, and the action."""

    observations: Mapping[str, Observation]
    action: Action
    max_episode_steps: int | None = None
    """None: no limit is known."""

    def size_of(self, groups: tuple[str, ...]) -> int:
        """Width of the concatenation of flat groups.

        Raises:
            ConfigError: there is no such group, or it is not flat; names the groups that there are.
        """
        for group in groups:
            found = self.observations.get(group)
            if found is None:
                raise ConfigError(
                    f"observations: there is no group {group!r}; the environment has {', '.join(self.observations)}"
                )
            if len(found.shape) != 1:
                raise ConfigError(
                    f"observations: group {group!r} has shape {list(found.shape)}; an MLP reads flat ones"
                )
        return sum(self.observations[group].size for group in groups)

    def write(self, folder: Path) -> None:
        """Write ``spaces.json`` into a folder."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> Spaces:
        """Read what :meth:`write` wrote.

        Raises:
            ConfigError: it cannot be read, or is something else.
        """
        try:
            raw: dict[str, Any] = json.loads(file.read_text())
            groups = {n: Observation(tuple(o["shape"]), o["dtype"]) for n, o in raw["observations"].items()}
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw["action"].items()}
            action = Action(**fields)
            return cls(observations=groups, action=action, max_episode_steps=raw["max_episode_steps"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file} describes no environment: {error!r}; it is written by a control run") from None
