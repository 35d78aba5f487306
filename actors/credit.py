"""How much work the server may send: told only when that number has grown."""

from __future__ import annotations

from async_rl.client import Client


class Credit:
    """What was offered and has not come yet."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._offered = 0

    def use(self, count: int) -> None:
        """So much work came."""
        self._offered = max(0, self._offered - count)

    def offer(self, room: int) -> None:
        """So much could be taken now."""
        if room > self._offered:
            self._offered = room
            self._client.send("credit", count=room)
