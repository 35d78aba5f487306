"""Frozen lake: maps for gymnasium's ``FrozenLake-v1``, and the text that shows where one stands on a map.

    A..O/.O../...O/O..G      A the agent, . ice, O a hole, G the goal; actions 0 left, 1 down, 2 right, 3 up

Every map has a way to the goal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from async_rl.tasks.problem import Problem

SIZE = 4
STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Row and column that each action adds."""
_MAPS = 3_000
_HOLES = (3, 6)
"""Fewest and most holes of a map."""
_TEXT = str.maketrans({"S": ".", "F": ".", "H": "O"})


def problems() -> Iterator[tuple[object, Problem]]:
    """Draw maps with a way from the upper left to the lower right corner.

    Yields:
        ``(key, problem)``: the map, as an argument of ``gymnasium.make``, without slipping.
    """
    rng = random.Random("frozenlake")
    seen: set[tuple[str, ...]] = set()
    while len(seen) < _MAPS:
        desc = _draw(rng)
        if desc not in seen and distances(desc)[0] is not None:
            seen.add(desc)
            yield desc, Problem(prompt=picture(desc, 0), columns={"make": {"desc": list(desc), "is_slippery": False}})


def picture(desc: Sequence[str], cell: int) -> str:
    """The map with the agent in ``cell``, counted row by row."""
    text = "".join(desc).translate(_TEXT)
    text = f"{text[:cell]}A{text[cell + 1 :]}"
    width = len(desc[0])
    return "/".join(text[i : i + width] for i in range(0, len(text), width))


def distances(desc: Sequence[str]) -> list[int | None]:
    """Fewest moves from each cell to the goal; None from where there is no way, holes among them."""
    cells, width = "".join(desc), len(desc[0])
    found: list[int | None] = [None] * len(cells)
    frontier = [cells.index("G")]
    found[frontier[0]] = 0
    for cell in frontier:  # grows while it is walked
        for action in range(len(STEPS)):
            other = neighbour(cell, action, len(desc), width)
            if found[other] is None and cells[other] != "H":
                found[other] = (found[cell] or 0) + 1
                frontier.append(other)
    return found


def neighbour(cell: int, action: int, height: int, width: int) -> int:
    """The cell that an action leads to; at the edge, the same."""
    row, column = divmod(cell, width)
    down, right = STEPS[action]
    row, column = min(max(row + down, 0), height - 1), min(max(column + right, 0), width - 1)
    return row * width + column


def _draw(rng: random.Random) -> tuple[str, ...]:
    cells = ["F"] * (SIZE * SIZE)
    for hole in rng.sample(range(1, SIZE * SIZE - 1), rng.randint(*_HOLES)):
        cells[hole] = "H"
    cells[0], cells[-1] = "S", "G"
    text = "".join(cells)
    return tuple(text[i : i + SIZE] for i in range(0, len(text), SIZE))
