"""Small pictures of worlds, drawn with numpy alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Canvas:
    """A white picture with metres as its unit; (0, 0) is in the middle of the width, y goes up.

    Args:
        width: in pixels.
        height: in pixels.
        metres: that ``width`` shows.
        middle: where y = 0 is, as a share of the height from above.
    """

    def __init__(self, width: int, height: int, metres: float, middle: float) -> None:
        self.pixels: npt.NDArray[np.uint8] = np.full((height, width, 3), 255, np.uint8)
        scale = metres / width
        self._x = ((np.arange(width) + 0.5 - width / 2) * scale)[None, :]
        self._y = ((height * middle - 0.5 - np.arange(height)) * scale)[:, None]

    def line(
        self, start: tuple[float, float], end: tuple[float, float], radius: float, colour: tuple[int, int, int]
    ) -> None:
        """A line with round ends: all points within ``radius`` of it."""
        dx, dy = end[0] - start[0], end[1] - start[1]
        length = dx * dx + dy * dy or 1.0  # a point
        along = np.clip(((self._x - start[0]) * dx + (self._y - start[1]) * dy) / length, 0, 1)
        distance = np.hypot(self._x - start[0] - along * dx, self._y - start[1] - along * dy)
        self.pixels[distance <= radius] = colour
