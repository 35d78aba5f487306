"""The frames of several groups in one message, in which small arrays are side by side.

    frames = { joint frame | large frames of the groups whose small arrays are in it } × as many as are needed

A joint frame takes the small arrays of one group after the other, until those of the next would make it longer than
:data:`JOINT_MOST`. Sender and receiver find that out from the sizes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.errors import WireError
from async_rl.wire.header import Frame
from async_rl.wire.layout import Laid, Placement

JOINT_MOST = 1 << 20
"""Bytes of a joint frame, unless one group alone has more."""


def joined(laid: Sequence[Laid]) -> list[Frame]:
    """The frames of these groups; a joint part that is alone in its frame is not copied."""
    frames: list[Frame] = []
    parts: list[Frame] = []
    filled = place = 0
    for group in laid:
        if not parts or filled + len(group.joint) > JOINT_MOST:
            _fill(frames, place, parts)
            place, parts, filled = len(frames), [], 0
            frames.append(b"")
        parts.append(group.joint)
        filled += len(group.joint)
        frames += group.large
    _fill(frames, place, parts)
    return frames


def _fill(frames: list[Frame], place: int, parts: Sequence[Frame]) -> None:
    if parts:
        frames[place] = parts[0] if len(parts) == 1 else b"".join(parts)


class JointReader:
    """Takes the frames of one group after the other.

    Args:
        frames: of a message, without its header.
        most: bytes of each.
        num_groups: that are to be read.

    Raises:
        WireError: ``frame_too_large``.
    """

    def __init__(self, frames: Sequence[Frame], most: int, num_groups: int) -> None:
        for frame in frames:
            if len(frame) > most:
                raise WireError("frame_too_large", f"{len(frame)} bytes")
        self._frames = frames
        self._is_alone = num_groups == 1
        self._next = 0
        self._joint: Frame | None = None
        self._used = 0

    def take(self, placed: Placement) -> tuple[Frame, list[Frame]]:
        """Joint part and large frames of the next group. A part of a frame is copied: the others must not keep it.

        Raises:
            WireError: ``frame_count``, ``bad_shape``.
        """
        joint = self._joint
        if joint is None or self._used + placed.joint > JOINT_MOST:
            self._close()
            self._joint = joint = self._take_frame()
            self._used = 0
        end = self._used + placed.joint
        if end > len(joint):
            raise WireError("bad_shape", f"small arrays of {end} bytes are described, there are {len(joint)}")
        part = joint if self._is_alone else bytes(joint[self._used : end])
        self._used = end
        large = [self._take_frame() for _ in placed.large]
        if list(map(len, large)) != placed.large:
            raise WireError("bad_shape", f"frames of {placed.large} bytes are described, not {list(map(len, large))}")
        return part, large

    def end(self) -> None:
        """All groups are read.

        Raises:
            WireError: ``frame_count``, ``bad_shape``.
        """
        self._close()
        if self._next != len(self._frames):
            raise WireError("frame_count", f"{self._next} described, {len(self._frames)} received")

    def _take_frame(self) -> Frame:
        if self._next == len(self._frames):
            raise WireError("frame_count", "fewer frames than are described")
        self._next += 1
        return self._frames[self._next - 1]

    def _close(self) -> None:
        if self._joint is not None and self._used != len(self._joint):
            raise WireError("bad_shape", f"small arrays of {self._used} bytes are not {len(self._joint)} bytes")
