"""What actors, scorers and the evaluator have in common as processes, whatever they work on.

    command line ─► config ─► joined (client open, heartbeats run) ─► parts of its own ─► run ─► all closed, last first

Each ``main`` builds its own parts between :func:`joined` and :meth:`Process.run`.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from actors.receiver import Receiver
from actors.relay import open_relay
from async_rl.base_checksum import base_of
from async_rl.client import Client
from async_rl.config import RunConfig
from async_rl.curve import ClientKeys
from async_rl.process import spare_what_is_loaded
from async_rl.protocol import Role
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest
from async_rl.wire import Header

CONNECT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a loop ended."""

    reason: str
    error: bool

    @classmethod
    def from_wire(cls, header: Header) -> Stop:
        """What the server's ``stop`` says."""
        return cls(str(header["reason"]), bool(header["error"]))


class Loop(Protocol):
    """What runs until the server says stop. Everything here is read from the client's thread, too."""

    @property
    def counts(self) -> Mapping[str, int]:
        """What was done so far."""

    def in_flight(self) -> list[list[float]]:
        """``[ordinal, attempt, age in seconds]`` of all work that is held."""

    def info(self) -> dict[str, Any]:
        """Counters and states, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One of them, from the handshake on."""

    name: str
    config: RunConfig
    address: str
    """Of the buffer server."""
    client: Client
    keys: ClientKeys | None
    welcome: Header
    timer: StateTimer
    parts: contextlib.ExitStack
    """Closes what the process has built, the last first, before the client says goodbye."""

    @property
    def manifest(self) -> Manifest | None:
        """The newest version at the handshake; None: it is announced later."""
        wire = self.welcome.get("manifest")
        return Manifest.from_wire(wire) if wire else None

    def receiver(self, *, relays: bool = False) -> Receiver:
        """The receiver of this run's weights, one of the parts.

        Args:
            relays: sends them on to other hosts, where the run says so.
        """
        follows = relays and self.config.weights.relay > 0 and self.config.weights.path != "shm"
        relay = open_relay(self.config, self.address, self.keys) if follows else None
        receiver = Receiver(
            self.config.weights.pulls,
            lambda: self.client.weights_address,
            self.welcome["run_id"],
            keys=self.keys,
            relay=relay,
            delta=self.config.weights.delta,
            follows=follows,
        )
        if follows:
            key = self.keys.public.decode() if self.keys is not None else ""
            self.client.send("relay", address=relay.address if relay is not None else "", key=key)
        return self.parts.enter_context(contextlib.closing(receiver))

    def run(self, loop: Loop, until_stopped: Callable[[], Stop]) -> None:
        """Run a loop, which the heartbeats tell about, and say how it ended.

        Args:
            loop: says what it holds.
            until_stopped: runs it.

        Raises:
            SystemExit: the run has failed: an error of the run is this process's exit code, too.
        """
        self.client.beat_info = lambda: {
            "timer": self.timer.drain(),
            "in_flight": loop.in_flight(),
            "info": loop.info(),
        }
        spare_what_is_loaded()
        began = time.monotonic()
        stop = until_stopped()
        seconds = time.monotonic() - began
        print(f"{self.name}: stopped after {seconds:.1f} s ({stop.reason}): {dict(loop.counts)}", flush=True)
        if stop.error:
            sys.exit(1)


def command_line(description: str, name: str | None) -> argparse.ArgumentParser:
    """``CONFIG --connect tcp://HOST:PORT --name NAME``; ``name`` is what it is called without the option."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("config")
    parser.add_argument("--connect", required=True, help="address of the buffer server, tcp://HOST:PORT")
    parser.add_argument("--name", default=name)
    return parser


@contextlib.contextmanager
def joined(role: Role, config: RunConfig, address: str, name: str, stage: str = "") -> Iterator[Process]:
    """Join the run; heartbeats go out while the parts are built, so that a long start is not taken for death.

    Args:
        role: what this process is.
        config: of the run.
        address: of the buffer server.
        name: of this process.
        stage: of a scorer.

    Raises:
        ConfigError: the keys, or the base of an adapter, cannot be read.
        HandshakeError: the server refuses us.
        DeadlineError: nothing answered in time.
    """
    timer, keys = StateTimer(), ClientKeys.of(config.buffer.keys)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher turns Ctrl-C into an orderly stop
    base = base_of(config)
    with Client(address, role, name, config.contract_hash(), stage=stage, keys=keys, base=base) as client:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        client.beat_info = lambda: {"timer": timer.drain()}
        welcome = client.connect(CONNECT_TIMEOUT_S)
        with contextlib.ExitStack() as parts:
            yield Process(
                name=name,
                config=config,
                address=address,
                client=client,
                keys=keys,
                welcome=welcome,
                timer=timer,
                parts=parts,
            )
