"""The lives of the buffer server: the first one binds an address, each further one comes back to it.

start ─► server.json ─► serving ─► dead ─► --recover, same address ─► server.json names the new process ─► serving
                           └─ silent for too long: ended, then the same
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from async_rl.errors import AsyncRLError
from async_rl.launch.children import Child
from async_rl.launch.commands import Commands
from async_rl.launch.crew import Crew, Member
from async_rl.launch.ending import describe
from async_rl.launch.interrupts import Interrupts
from async_rl.runfolder import read_json

START_S = 60.0
"""A server must have bound its address within this time, in each of its lives."""
AWAY_S = 2.0
"""A turn that took longer was the launcher's own sleep: what it did not hear then says nothing about the server."""
_LOOK_S = 0.05


class ServerKeeper:
    """Looks after the server.

    Args:
        crew: starts it.
        commands: how.
        silent_s: a server that lives but says nothing for so long is ended.
    """

    def __init__(self, crew: Crew, commands: Commands, silent_s: float) -> None:
        self._crew, self._commands, self._silent_s = crew, commands, silent_s
        self._serving: Child | None = None
        self._heard = self._turned = time.monotonic()
        self.run_id = ""
        """Of the run, the same in all lives; empty before the first has bound."""

    @property
    def member(self) -> Member:
        """The server."""
        return self._crew.members["server"]

    @property
    def is_serving(self) -> bool:
        """Whether one is there that has bound the address."""
        return self._serving is not None and self._serving.poll() is None

    def start(self, interrupts: Interrupts) -> str:
        """Start it; its address for clients on this host.

        Raises:
            AsyncRLError: it cannot start, or not in time, or the user does not want it any more.
        """
        self._note.unlink(missing_ok=True)
        server = self._crew.add("server", "server", self._commands.server())
        deadline = time.monotonic() + START_S
        while not (found := read_json(self._note)).get("address"):
            self._crew.tend(server, lambda child: child.poll() is not None)
            if server.lives.given_up:
                raise AsyncRLError(describe(self._crew.last_life("server")))
            if interrupts.count:
                raise AsyncRLError("interrupted while starting")
            if time.monotonic() > deadline:
                log = self._crew.last_life("server").log
                raise AsyncRLError(f"the buffer server did not bind its address within {START_S:.0f} s; see {log}")
            interrupts.wait(_LOOK_S)
        server.command = self._commands.server(recover=True)
        self._serving, self.run_id = server.child, str(found.get("run_id", ""))
        return local_address(str(found["address"]))

    def turn(self, *, heard: bool) -> None:
        """A turn of the launcher, in which something was heard of the server or not."""
        now = time.monotonic()
        if heard or now - self._turned > AWAY_S:
            self._heard = now
        self._turned = now

    def look_after(self, on_return: Callable[[], None]) -> None:
        """Start a dead one again; end one that does not come up, or does not move, so that it can be.

        Args:
            on_return: called when a new life has come back to the address.
        """
        server, now = self.member, time.monotonic()
        self._crew.tend(server, lambda child: child.poll() not in (None, 0))
        child = server.child
        if child is None or child.poll() is not None:
            return
        if child is not self._serving:
            if read_json(self._note).get("pid") == child.pid:
                self._serving, self._heard = child, now
                on_return()
            elif now - child.started > START_S:
                self._crew.kill(server, f"did not bind its address within {START_S:.0f} s: it is ended")
        elif now - self._heard > self._silent_s:
            self._crew.kill(server, f"lives but has been silent for {now - self._heard:.0f} s: it is ended")

    @property
    def _note(self) -> Path:
        return self._commands.out / "server.json"


def local_address(address: str) -> str:
    """The address for clients on this host, when the server listens on all interfaces."""
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//*:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
