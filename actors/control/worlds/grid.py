"""A small table seen from above: an arm puts the named block on the named place.

    "put  red block  on  blue place"     ┌───┬───┬───┬───┐   ▒ places    ■ blocks    ⌐ ¬ gripper
     0    2          1   7               │   │ ▒ │   │ ■ │
                                         ├───┼───┼───┼───┤   a step: reach over the cell (column, row), then the gripper
                                         │⌐ ¬│   │ ■ │ ▒ │   stays as it is, closes (takes the block below) or opens
                                         └───┴───┴───┴───┘   (lets it go)

A gymnasium vector environment (autoreset ``next_step``), all N tables at once in numpy. Its reward is sparse: 1 for the
block on its place, which ends the episode, so that the mean return is the success rate. :func:`reward` is a denser
judgement of a whole episode for ``episodes.reward``, :func:`demonstrations` shows how it is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CELL = 4
"""Pixels of a cell's side."""
COLOURS = {"red": (240, 50, 40), "green": (40, 220, 60), "blue": (60, 90, 250)}
WORDS = ("put", "on", *(f"{colour} {what}" for what in ("block", "place") for colour in COLOURS))
"""The vocabulary; a token is a position in it."""
PUT, ON, BLOCK, PLACE = 0, 1, 2, 2 + len(COLOURS)
STAY, CLOSE, OPEN = 0, 1, 2
"""Third part of an action; the first two are the column and the row."""
NO_BLOCK = -1

_TABLE = np.array([12, 12, 16], np.uint8)
_PAINT = np.array(list(COLOURS.values()), np.uint8)
_WHITE = np.array([255, 255, 255], np.uint8)
_ZOOM = 16
_DEMONSTRATED = 256
"""Tables on which it is shown how to do it."""


class PickAndPlace(VectorEnv):  # type: ignore[type-arg]
    """N tables that step together.

    Observation groups: ``image`` uint8 [H, W, 3]; ``instruction`` int32 [4]; ``arm`` float32 [3], what the arm feels:
    column and row, 0 to 1, and whether the gripper holds something; ``state`` float32 [7], which is meant for judges:
    gripper, named block and its place, each (column, row), and 1 while the gripper holds that block. Actions: ``size``,
    ``size`` and 3 choices.

    Args:
        num_envs: N.
        seed: of the first scenes, until a reset gives another.
        size: cells of the table's side.
        blocks: blocks, and places, on a table, all of different colours; one of each is named.
        max_steps: an episode is truncated after so many.
        render_mode: ``rgb_array`` or None; :meth:`render` works with both.
    """

    def __init__(
        self,
        num_envs: int = 1,
        seed: int = 0,
        size: int = 4,
        blocks: int = 2,
        max_steps: int = 4,
        render_mode: str | None = "rgb_array",
    ) -> None:
        if not 1 <= blocks <= len(COLOURS):
            raise ValueError(f"blocks = {blocks}: there are {len(COLOURS)} colours")
        if size * size < 2 * blocks + 1:
            raise ValueError(f"size = {size}: {blocks} blocks, their places and the gripper do not fit")
        self.num_envs = num_envs
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 4, "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = render_mode
        side = size * CELL
        self.single_observation_space = gymnasium.spaces.Dict(
            {
                "image": gymnasium.spaces.Box(0, 255, (side, side, 3), np.uint8),
                "instruction": gymnasium.spaces.Box(0, len(WORDS) - 1, (4,), np.int32),
                "arm": gymnasium.spaces.Box(0, 1, (3,), np.float32),
                "state": gymnasium.spaces.Box(0, max(1, size - 1), (7,), np.float32),
            }
        )
        self.choices = (size, size, 3)
        self.single_action_space = gymnasium.spaces.MultiDiscrete(list(self.choices))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.max_episode_steps = max_steps
        self._size, self._blocks = size, blocks
        self._rows = np.arange(num_envs)
        self._rng = np.random.default_rng(seed)
        self._gripper = np.zeros((num_envs, 2), np.int64)
        self._block = np.zeros((num_envs, blocks, 2), np.int64)
        self._place = np.zeros((num_envs, blocks, 2), np.int64)
        self._block_colour = np.zeros((num_envs, blocks), np.int64)
        self._place_colour = np.zeros((num_envs, blocks), np.int64)
        self._held = np.full(num_envs, NO_BLOCK)
        self._steps = np.zeros(num_envs, np.int64)
        self.ended = np.zeros(num_envs, np.bool_)
        """bool [N]: the next step only starts a new episode."""
        self._draw(self._rows, self._rng)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """New scenes: of one seed all different, of a seed for each table the same wherever the seeds are equal."""
        if isinstance(seed, Sequence):
            for one in dict.fromkeys(seed):
                self._draw(np.flatnonzero([s == one for s in seed]), np.random.default_rng(one), alike=one is not None)
        else:
            self._rng = self._rng if seed is None else np.random.default_rng(seed)
            self._draw(self._rows, self._rng)
        return self._observe(), {}

    def step(
        self, actions: npt.NDArray[Any]
    ) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.float32], Bools, Bools, dict[str, Any]]:
        """Reach, then use the gripper; tables whose episode has ended start a new one instead."""
        fresh = np.flatnonzero(self.ended)
        active = ~self.ended
        self._gripper = np.where(active[:, None], np.asarray(actions, np.int64)[:, :2], self._gripper)
        solved = self._grip(np.where(active, actions[:, 2], STAY))
        self._steps += 1
        truncated = active & ~solved & (self._steps >= self.max_episode_steps)
        self.ended = solved | truncated
        if len(fresh):
            self._draw(fresh, self._rng)
        return self._observe(), solved.astype(np.float32), solved, truncated, {}

    def render(self) -> tuple[npt.NDArray[np.uint8], ...]:  # type: ignore[override]
        """One picture, of the first table; the stripe above it shows the named block and its place."""
        picture = self._image()[0]
        stripe = np.broadcast_to(_TABLE // 2, (CELL, picture.shape[1], 3)).copy()
        stripe[1:3, 1:3] = _PAINT[self._block_colour[0, 0]]
        stripe[:, 2 * CELL : 3 * CELL] = _PAINT[self._place_colour[0, 0]] // 2
        return (np.concatenate([stripe, picture]).repeat(_ZOOM, 0).repeat(_ZOOM, 1),)

    def perfect_actions(self) -> npt.NDArray[np.int32]:
        """What solves each scene, int32 [N, 3]: let go of a wrong block, take the named one, put it on its place."""
        holds = self._held == 0
        there = np.where(holds[:, None], self._place[:, 0], self._block[:, 0])
        return np.column_stack([there, np.where(self._held == NO_BLOCK, CLOSE, OPEN)]).astype(np.int32)

    def _draw(self, rows: Ints, rng: np.random.Generator, alike: bool = False) -> None:
        """New scenes for some tables; the first block and the first place are the named ones."""
        count = 1 if alike else len(rows)
        cells = rng.random((count, self._size**2)).argsort(1)[:, : 2 * self._blocks + 1]
        where = np.stack([cells % self._size, cells // self._size], -1)
        self._gripper[rows] = where[:, 0]
        self._block[rows] = where[:, 1 : 1 + self._blocks]
        self._place[rows] = where[:, 1 + self._blocks :]
        for colour in (self._block_colour, self._place_colour):
            colour[rows] = rng.random((count, len(COLOURS))).argsort(1)[:, : self._blocks]
        self._held[rows], self._steps[rows], self.ended[rows] = NO_BLOCK, 0, False

    def _grip(self, command: Ints) -> Bools:
        """Close or open the grippers [N]; where that puts the named block on its place."""
        carrying = self._held != NO_BLOCK
        self._block[carrying, self._held[carrying]] = self._gripper[carrying]
        below = (self._block == self._gripper[:, None]).all(-1)  # [N, blocks], a carried one included
        takes = (command == CLOSE) & ~carrying & below.any(1)
        lets_go = (command == OPEN) & carrying & (below.sum(1) == 1)  # not onto another block
        solved: Bools = lets_go & (self._held == 0) & (self._gripper == self._place[:, 0]).all(1)
        self._held = np.where(takes, below.argmax(1), np.where(lets_go, NO_BLOCK, self._held))
        return solved

    def _observe(self) -> dict[str, npt.NDArray[Any]]:
        words = np.empty((self.num_envs, 4), np.int32)
        words[:] = PUT, 0, ON, 0
        words[:, 1] = BLOCK + self._block_colour[:, 0]
        words[:, 3] = PLACE + self._place_colour[:, 0]
        holds = (self._held == 0)[:, None]
        state = np.concatenate([self._gripper, self._block[:, 0], self._place[:, 0], holds], 1, dtype=np.float32)
        arm = np.column_stack([self._gripper / max(1, self._size - 1), self._held != NO_BLOCK]).astype(np.float32)
        return {"image": self._image(), "instruction": words, "arm": arm, "state": state}

    def _image(self) -> npt.NDArray[np.uint8]:
        """Pictures [N, H, W, 3]: a place fills its cell, a block is the middle of one, the gripper its corners."""
        size, rows = self._size, self._rows
        cells = np.empty((self.num_envs, size, size, CELL, CELL, 3), np.uint8)  # row, column, pixel row and column
        cells[:] = _TABLE
        for place, colour in zip(self._place.swapaxes(0, 1), self._place_colour.T, strict=True):
            cells[rows, place[:, 1], place[:, 0]] = (_PAINT[colour] // 2)[:, None, None]
        for index in range(self._blocks):
            self._draw_blocks(cells, np.full(self.num_envs, index), self._held != index)
        self._draw_blocks(cells, self._held, self._held != NO_BLOCK)  # above the others
        closed = self._held != NO_BLOCK
        finger = np.zeros((2, CELL, CELL, 1), np.bool_)  # open: the corners; closed: two bars
        finger[0, :: CELL - 1, :: CELL - 1] = True
        finger[1, :, :: CELL - 1] = True
        x, y = self._gripper.T
        cells[rows, y, x] = np.where(finger[closed.astype(np.int64)], _WHITE, cells[rows, y, x])
        return cells.transpose(0, 1, 3, 2, 4, 5).reshape(self.num_envs, size * CELL, size * CELL, 3)

    def _draw_blocks(self, cells: npt.NDArray[np.uint8], index: Ints, drawn: Bools) -> None:
        """Draw one block per table, where ``drawn``."""
        rows = self._rows[drawn]
        x, y = self._block[rows, index[drawn]].T
        colour = _PAINT[self._block_colour[rows, index[drawn]]]
        cells[rows, y, x, 1:-1, 1:-1] = colour[:, None, None]


def demonstrations(count: int, seed: int, **kwargs: Any) -> dict[str, npt.NDArray[Any]]:
    """Where an arm reaches that is led by hand, also where a clumsy one has left things: every fifth action is a slip.

    Nobody wrote down what the gripper did: that part of the actions is noise, and left to reinforcement learning.

    Args:
        count: steps.
        seed: of scenes, slips and noise.
        kwargs: of :class:`PickAndPlace`.

    Returns:
        ``obs/GROUP`` [count, ...], and ``actions`` int32 [count, 3].
    """
    env, rng = PickAndPlace(_DEMONSTRATED, **kwargs), np.random.default_rng(seed)
    seen, _ = env.reset(seed=seed)
    steps: list[dict[str, npt.NDArray[Any]]] = []
    while sum(len(step["actions"]) for step in steps) < count:
        actions, acts = env.perfect_actions(), ~env.ended
        shown = np.column_stack([actions[:, :2], rng.integers(0, 3, _DEMONSTRATED)]).astype(np.int32)
        steps.append({f"obs/{name}": array[acts] for name, array in seen.items()} | {"actions": shown[acts]})
        slips = rng.random((_DEMONSTRATED, 1)) < 1 / 5
        seen, *_ = env.step(np.where(slips, rng.integers(0, env.choices, actions.shape), actions))
    return {name: np.concatenate([step[name] for step in steps])[:count] for name in steps[0]}


def reward(episode: Mapping[str, npt.NDArray[Any]]) -> float:
    """How far a whole episode came: the highest of these.

        1.0    the named block lies on its place            0.25   the gripper held the named block
        0.5    the gripper held it over its place           0.1    the gripper was over it

    Args:
        episode: see :mod:`actors.control.judges`.
    """
    if float(np.sum(episode["rewards"])) > 0:
        return 1.0
    path = np.concatenate([episode["obs/state"][1:], episode["final_obs/state"][None]])  # after each step
    gripper, block, place, holds = path[:, 0:2], path[:, 2:4], path[:, 4:6], path[:, 6] > 0
    if (holds & (gripper == place).all(1)).any():
        return 0.5
    if holds.any():
        return 0.25
    return 0.1 if (gripper == block).all(1).any() else 0.0
