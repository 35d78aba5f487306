"""The outgoing post: handlers put messages in, the socket loop takes them out. So handlers need no socket."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from async_rl.buffer.acks import Row
from async_rl.buffer.roster import Session
from async_rl.wire import Frame, pack_header

Letter = tuple[bytes, Sequence[Frame]]


class Post:
    """Messages by identity, in order."""

    def __init__(self) -> None:
        self._letters: list[Letter] = []
        self._acks: dict[bytes, tuple[int, list[Row]]] = {}
        """By identity: which letter is its ``ack``, and the rows of it."""

    def send(self, to: Session | bytes, kind: str, **fields: Any) -> None:
        """Queue a message without frames."""
        identity = to if isinstance(to, bytes) else to.identity
        self._letters.append((identity, [pack_header({"type": kind, **fields})]))

    def send_frames(self, to: Session, frames: Sequence[Frame]) -> None:
        """Queue an encoded message."""
        self._letters.append((to.identity, frames))

    def send_all(self, to: Iterable[Session], kind: str, **fields: Any) -> None:
        """Queue the same message for several; it is packed once."""
        frames = [pack_header({"type": kind, **fields})]
        self._letters.extend((session.identity, frames) for session in to)

    def rows(self, to: Session) -> list[Row]:
        """Where the rows of an ``ack`` are added: all that a client is told of until :meth:`take` are one message.

        It has its place where its first row had come.
        """
        if to.identity not in self._acks:
            self._acks[to.identity] = (len(self._letters), [])
            self._letters.append((to.identity, ()))
        return self._acks[to.identity][1]

    def take(self) -> list[Letter]:
        """Everything queued since the last call."""
        letters, self._letters = self._letters, []
        acks, self._acks = self._acks, {}
        for identity, (place, rows) in acks.items():
            letters[place] = (identity, [pack_header({"type": "ack", "results": rows})])
        return letters
