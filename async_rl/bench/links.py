"""Links of pretended hosts: TCP proxies, each of which lets so many bytes a second out of its host and no more.

    host's socket ──► reader ──paced: all connections of a host share its link──► writer ──► other hosts
                  ◄── requests, as they come ◄──

    python -m async_rl.bench.links BYTES_PER_S     answers "open" {addresses} by the addresses of their links

On one machine its processors, not its links, would be what is measured. What comes into a host is not limited: it is
what others may send.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping
from typing import Any

from async_rl.bench.weights_parts import ANSWER_S, answer_lines

_PIECE = 128 << 10


class Link:
    """One host's way out.

    Args:
        address: ``tcp://HOST:PORT`` of its socket.
        bytes_per_s: what the link carries.
    """

    def __init__(self, address: str, bytes_per_s: float) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._host, self._port = host, int(port)
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        """Listen; the address."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_PIECE)
        self._server = server
        return f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection(self._host, self._port, limit=_PIECE)
        for task in (self._forward(reader, outer, paced=False), self._forward(inner, writer, paced=True)):
            made = asyncio.ensure_future(task)
            self._tasks.add(made)
            made.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, paced: bool) -> None:
        try:
            while piece := await reader.read(_PIECE):
                if paced:
                    await self._pass(len(piece))
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass  # one end is gone, which the other is told of
        finally:
            writer.close()

    async def _pass(self, count: int) -> None:
        now = asyncio.get_running_loop().time()
        starts = max(now, self._free_at)
        self._free_at = starts + count / self._bytes_per_s
        await asyncio.sleep(self._free_at - now)


class Links:
    """All of them, in a thread with an event loop.

    Args:
        bytes_per_s: of each.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._links: list[Link] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="links", daemon=True).start()

    def open(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Links in front of ``addresses``."""
        return {"addresses": [self._open(address) for address in asked["addresses"]]}

    def _open(self, address: str) -> str:
        link = Link(address, self._bytes_per_s)
        self._links.append(link)
        return asyncio.run_coroutine_threadsafe(link.open(), self._loop).result(ANSWER_S)


def main() -> None:
    """The process."""
    answer_lines({"open": Links(float(sys.argv[1])).open})


if __name__ == "__main__":
    main()
