"""A cable between two network namespaces, where the kernel has no ``tc netem``: a process, which SIGUSR1 makes bad.

namespace A ── tap eth0 ─► read ─► lost? ─► due in 50 ms ─► write ─► tap ── namespace B          and the way back

python wire.py NAMESPACE_A DEVICE_A NAMESPACE_B DEVICE_B DELAY_S LOSS
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import signal
import struct
import sys
import time
from pathlib import Path

_NETNS = 0x40000000
_MAKE_TAP = 0x400454CA
_TAP, _NO_PACKET_INFO = 0x0002, 0x1000
_FRAME = 65535
_DEATH_SIGNAL = 1


def open_tap(namespace: str, device: str) -> int:
    """A new tap device in that namespace; its frames come and go through the descriptor."""
    with Path(f"/run/netns/{namespace}").open() as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _NETNS):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, _MAKE_TAP, struct.pack("16sH22x", device.encode(), _TAP | _NO_PACKET_INFO))
    return handle


def forward(ends: tuple[int, int], delay_s: float, loss: float) -> None:
    """For ever; each end's frames to the other, from SIGUSR1 on with delay and loss."""
    chance, waiting, count, bad = random.Random(0), [], 0, []
    signal.signal(signal.SIGUSR1, lambda number, _: bad.append(number))
    print("ready", flush=True)
    while True:
        rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(ends, [], [], rest)
        for end in ready:
            frame = os.read(end, _FRAME)
            if not bad or chance.random() >= loss:
                count += 1
                due = time.monotonic() + (delay_s if bad else 0.0)
                heapq.heappush(waiting, (due, count, ends[1 - ends.index(end)], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(waiting)
            try:
                os.write(to, frame)
            except OSError:  # that end is down, or its queue is full: a cable loses such frames, too
                continue


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # it ends with the test
    first, second = open_tap(sys.argv[1], sys.argv[2]), open_tap(sys.argv[3], sys.argv[4])
    forward((first, second), float(sys.argv[5]), float(sys.argv[6]))
