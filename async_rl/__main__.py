"""``python -m async_rl`` is the command line ``async-rl``; both begin here.

Ctrl-C is one sentence from the first moment on: its handler is there before anything that takes time is imported.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType


def _leave(number: int, _: FrameType | None) -> None:
    """Ctrl-C where nothing has to be wound down."""
    print("async-rl: interrupted", file=sys.stderr, flush=True)
    sys.exit(128 + number)


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGINT, _leave)
    from async_rl import cli

    cli.main()


if __name__ == "__main__":
    main()
