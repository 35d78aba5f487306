"""A server without its socket, on a clock that the test turns, that can be killed and recovered from its journal."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from buffer_helpers import answer
from server_helpers import NUM_TASKS, NoWeights, hello, manifest

from async_rl.buffer.files import RunFiles
from async_rl.buffer.opening import open_ledger
from async_rl.buffer.records import Limits
from async_rl.buffer.run_lines import keep_lines
from async_rl.buffer.service import Service
from async_rl.config import RunConfig
from async_rl.protocol import Ticket
from async_rl.wire import Header, decode_groups, encode_groups, pack_header, unpack_header


class Bench:
    """One life of a server; ``now`` is its clock.

    Args:
        settings: the run.
        out: run folder.
        recover: take the place of the one that was killed.
        resume: checkpoint folder.
        now: the clock.
    """

    def __init__(
        self,
        settings: RunConfig,
        out: Path,
        *,
        recover: bool = False,
        resume: Path | None = None,
        now: float = 0.0,
    ) -> None:
        self.settings, self.out, self.now = settings, out, now
        self.files, self.weights = RunFiles(out), NoWeights()
        opened = open_ledger(settings, Limits(num_tasks=NUM_TASKS), out, resume, recover=recover)
        if recover or resume:
            keep_lines(self.files, opened.ledger)
        self.service = Service(
            settings,
            opened.ledger,
            self.files,
            self.weights,
            "run",
            now,
            lambda: None,
            recovered=opened.recovered,
            disowned=opened.disowned,
        )
        self.inbox: dict[bytes, list[tuple[Header, list[Any]]]] = defaultdict(list)

    @property
    def ledger(self) -> Any:
        return self.service.ledger

    def kill(self) -> None:
        """As by SIGKILL: what is not on disk is lost."""
        self.ledger.detach(remove=False)
        self.files.close()

    def recover(self) -> Bench:
        """Kill it, and start the next life."""
        self.kill()
        return Bench(self.settings, self.out, recover=True, now=self.now)

    def say(self, who: str, kind: str, **fields: Any) -> list[Header]:
        """A message; returns all that is sent to ``who`` because of it."""
        return self.raw(who, [pack_header({"type": kind, **fields})])

    def raw(self, who: str, frames: list[Any]) -> list[Header]:
        self.service.handle(who.encode(), frames, self.now)
        self._turn()
        return self.read(who)

    def read(self, who: str) -> list[Header]:
        """What was sent to ``who`` since it last read."""
        return [header for header, _ in self.inbox.pop(who.encode(), [])]

    def tick(self, seconds: float = 0.0, *, beating: tuple[str, ...] = ()) -> None:
        """Let time pass, in turns of the server's loop; ``beating`` clients beat in each."""
        end, turn_s = self.now + seconds, self.settings.buffer.heartbeat_s / 6
        while True:
            self.now = min(end, self.now + turn_s)
            for who in beating:
                self.service.handle(who.encode(), [pack_header({"type": "beat"})], self.now)
            self.service.tick(self.now, all_heard=True)
            self._turn()
            if self.now >= end:
                return

    def join(self, role: str, name: str, **fields: Any) -> Header:
        """Say hello; the welcome, or what else was answered. Further messages stay to be read."""
        frames = [hello(self.settings, role=role, name=name, **fields)]
        self.service.handle(name.encode(), frames, self.now)
        self._turn()
        header, _ = self.inbox[name.encode()].pop(0)
        return header

    def learner(self, group: str = "g", step: int = 0, epoch: int = 0, name: str = "l", **fields: Any) -> Header:
        """A learner that publishes its start version."""
        welcome = self.join("learner", name, group=group, step=step, **fields)
        self.say(name, "trained", step=-1, manifest=manifest(step, epoch).to_wire(), stats={})
        return welcome

    def live(self, name: str, version: int, epoch: int = 0) -> list[Header]:
        checksum = manifest(version).checksum
        return self.say(name, "live", version=version, epoch=epoch, checksum=checksum, transfer_s=0.0, commit_s=0.0)

    def tickets(self, name: str, count: int) -> list[Ticket]:
        """Ask for tickets."""
        headers = self.say(name, "credit", count=count)
        return [Ticket.from_wire(t) for h in headers if h["type"] == "tickets" for t in h["tickets"]]

    def submit(self, name: str, tickets: list[Ticket], **changes: Any) -> list[list[Any]]:
        """Proper groups for them; the rows of the acknowledgement."""
        headers = self.raw(name, encode_groups("submit", [answer(t, **changes) for t in tickets]))
        return [row for h in headers if h["type"] == "ack" for row in h["results"]]

    def shard(self, step: int, name: str = "l") -> list[tuple[int, int]]:
        """Ask for a step; ordinals and attempts of what comes."""
        self.service.handle(name.encode(), [pack_header({"type": "next", "step": step})], self.now)
        self._turn()
        letters = self.inbox.pop(name.encode(), [])
        shards = [decode_groups(header, frames) for header, frames in letters if header["type"] == "shard"]
        return [(g.ordinal, g.attempt) for groups in shards for g in groups]

    def train(self, step: int, epoch: int = 0, name: str = "l") -> list[Header]:
        wire = manifest(step + 1, epoch).to_wire()
        return self.say(name, "trained", step=step, manifest=wire, stats={})

    def _turn(self) -> None:
        self.service.tell(self.now)
        self.service.pump(self.now)
        for identity, frames in self.service.post.take():
            self.inbox[identity].append((unpack_header(frames[0]), list(frames[1:])))
