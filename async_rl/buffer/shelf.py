"""Entries by ordinal, with a count kept of when they must be trained: admission and delivery look at no entry alone.

put, take ─► entries, due {deadline: never-trained entries}        policy.leaves_time reads ``due`` only
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from async_rl.buffer.records import Entry


class Shelf(dict[int, Entry]):
    """Filled with ``shelf[ordinal] = entry`` and emptied with ``del`` and ``pop`` only.

    An entry keeps its ``deadline`` and its ``uses`` while it is on a shelf.
    """

    def __init__(self) -> None:
        super().__init__()
        self.due: Counter[int] = Counter()
        """Never-trained entries by deadline; deadlines of none are left out."""

    def __setitem__(self, ordinal: int, entry: Entry) -> None:
        if ordinal in self:
            raise RuntimeError(f"ordinal {ordinal} is in this place already")
        super().__setitem__(ordinal, entry)
        if not entry.uses:
            self.due[entry.deadline] += 1

    def __delitem__(self, ordinal: int) -> None:
        entry = self[ordinal]
        super().__delitem__(ordinal)
        self._forget(entry)

    def pop(self, ordinal: int, default: Any = None) -> Any:
        """Take an entry off; ``default`` if it is not here."""
        entry = super().pop(ordinal, None)
        if entry is None:
            return default
        self._forget(entry)
        return entry

    def _forget(self, entry: Entry) -> None:
        if entry.uses:
            return
        left = self.due[entry.deadline] - 1
        if left:
            self.due[entry.deadline] = left
        else:
            del self.due[entry.deadline]
