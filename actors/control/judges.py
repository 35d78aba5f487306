"""Who scores whole episodes (``episodes.reward``): the user's function, a reward model, or the environment itself.

    episodes of a group ─┬─ ""                 ─► sum of the environment's rewards
                         ├─ module:function    ─► f(episode) for each
                         └─ FILE (TorchScript) ─► model(final observations, lengths), once for all      ─► rewards [G]

An episode is a dictionary of arrays: ``obs/GROUP`` [T, ...], ``actions`` [T, A], ``rewards`` [T] of the environment,
``final_obs/GROUP`` [...], what followed the last step, and the flags ``terminated`` and ``truncated`` [] of its end;
neither is set where ``episodes.max_steps`` cut it off. Of an environment that resets at once and does not tell what an
episode ended in, the last observation before that stands in ``final_obs``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from actors.verifiers.worker import LoadError, import_callable
from async_rl.control.fragment import FINAL_OBS
from async_rl.data import Array
from async_rl.errors import AsyncRLError, ConfigError

Episode = Mapping[str, Array]
Judge = Callable[[Sequence[Episode]], npt.NDArray[np.float32]]
"""Scores the episodes of a group: [G]. What it cannot score is NaN, and the server replaces the group."""


def make_judge(reward: str) -> Judge:
    """The judge that ``episodes.reward`` names.

    Raises:
        ConfigError: there is no such function or file, or the file is no TorchScript model.
    """
    if not reward:
        return _sum_of_rewards
    if ":" in reward:
        return _FunctionJudge(reward)
    return _ModelJudge(Path(reward))


def _sum_of_rewards(episodes: Sequence[Episode]) -> npt.NDArray[np.float32]:
    return np.array([episode["rewards"].sum(dtype=np.float64) for episode in episodes], np.float32)


class _FunctionJudge:
    """A function of one episode."""

    def __init__(self, reward: str) -> None:
        self._name = reward
        try:
            self._function: Callable[[Episode], Any] = import_callable(reward)
        except LoadError as error:
            raise ConfigError(f"episodes.reward = {reward!r}: {error}") from None

    def __call__(self, episodes: Sequence[Episode]) -> npt.NDArray[np.float32]:
        """Scores [G].

        Raises:
            AsyncRLError: the function failed, or gave no number.
        """
        try:
            return np.array([float(self._function(episode)) for episode in episodes], np.float32)
        except Exception as error:  # the user's code
            raise AsyncRLError(f"episodes.reward = {self._name!r} failed on an episode: {error!r}") from error


class _ModelJudge:
    """A reward model in TorchScript: ``model(Dict[str, Tensor], Tensor) -> Tensor``.

    It gets the final observations by group [G, ...] and the lengths int64 [G], and gives [G], all on the CPU.
    """

    def __init__(self, path: Path) -> None:
        self._name = str(path)
        if not path.is_file():
            raise ConfigError(
                f"episodes.reward = {self._name!r}: there is no such file; it is module:function, or the path of a "
                "TorchScript reward model"
            )
        try:
            self._model = torch.jit.load(self._name, map_location="cpu").eval()
        except RuntimeError as error:
            first = (str(error).splitlines() or [""])[0]
            raise ConfigError(f"episodes.reward = {self._name!r} is no TorchScript model: {first}") from None

    @torch.no_grad()
    def __call__(self, episodes: Sequence[Episode]) -> npt.NDArray[np.float32]:
        """Scores [G].

        Raises:
            AsyncRLError: the model does not take these observations, or gives something else than [G].
        """
        groups = [name for name in episodes[0] if name.startswith(FINAL_OBS)]
        final = {n.removeprefix(FINAL_OBS): torch.from_numpy(np.stack([e[n] for e in episodes])) for n in groups}
        lengths = torch.tensor([len(episode["actions"]) for episode in episodes])
        try:
            scores = self._model(final, lengths)
        except RuntimeError as error:
            said = (str(error).strip().splitlines() or [""])[-1]
            raise AsyncRLError(f"episodes.reward = {self._name!r} failed on final observations: {said}") from error
        if not isinstance(scores, torch.Tensor) or scores.shape != (len(episodes),):
            found = list(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
            raise AsyncRLError(
                f"episodes.reward = {self._name!r} gave {found}, expected one score each: [{len(episodes)}]"
            )
        return np.asarray(scores.float().numpy())
