"""What a process prints must not end it: its log lies on the same disk as the run, and that may be full.

print ─► Output ─► stdout, stderr          OSError: the text is lost, the process goes on
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any, TextIO


class Output:
    """A text stream that takes whatever is written, and passes on what the stream below takes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or lose it."""
        with suppress(OSError):  # there is nowhere left to say so; the buffer server's books do
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered, if that can be."""
        with suppress(OSError):  # it stays in the buffer, the next flush tries again
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_full_disk() -> None:
    """From now on nothing that this process prints can raise. Doing it again changes nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Output):
            setattr(sys, name, Output(stream))
