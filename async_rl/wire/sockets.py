"""Messages in and out of a socket: small frames are copied, which is faster, large ones are used in place."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from async_rl.wire.header import Frame

_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""As plain numbers, which the socket takes at once."""
_COPY_BELOW = 65_536


def receive_frames(socket: zmq.Socket[bytes]) -> list[Frame]:
    """The frames of the rest of a message that waits in the socket.

    Raises:
        zmq.Again: none waits.
    """
    frames: list[Frame] = []
    while True:
        part = socket.recv(_NOBLOCK, copy=False)
        frames.append(part.bytes if len(part) < _COPY_BELOW else part.buffer)
        if not part.more:
            return frames


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    """Send a message at once.

    Raises:
        zmq.ZMQError: from the first frame: the socket takes no message now, or has no such peer.
    """
    for frame in frames[:-1]:
        socket.send(frame, _MORE, copy=len(frame) < _COPY_BELOW)
    socket.send(frames[-1], _NOBLOCK, copy=len(frames[-1]) < _COPY_BELOW)
