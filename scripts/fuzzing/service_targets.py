"""The server without its socket: sequences of messages from hostile clients of every role, among good ones.

Choices ─► which client says what, spoilt or not ─► Service.handle ─► letters: are they readable? is the bound kept?
                                                        end of a sequence ─► do the books close? is all JSON finite?
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.buffer import journaled, replay
from async_rl.buffer.files import RunFiles
from async_rl.buffer.journaled import JournaledLedger
from async_rl.buffer.records import Rules
from async_rl.buffer.service import Service
from async_rl.config import RunConfig
from async_rl.config.shared import shared_settings
from async_rl.data import Annotation, age
from async_rl.errors import WireError
from async_rl.protocol import PROTOCOL_VERSION, STAGES, Ticket
from async_rl.weights.manifest import Manifest
from async_rl.wire import SCHEMA_VERSION, decode_groups, encode_annotations, encode_groups, unpack_header
from fuzzing import samples
from fuzzing.choices import Choices
from fuzzing.wire_targets import Run, Target, message, packed

_MOST_MESSAGES = 60
_CAST = (
    (b"L", "learner", {}),
    (b"A", "actor", {}),
    (b"B", "actor", {}),
    (b"S", "scorer", {"stage": "reward"}),
    (b"R", "scorer", {"stage": "reference"}),
    (b"E", "evaluator", {}),
    (b"M", "monitor", {}),
    (b"Q", "recruit", {}),
)
_SAID = {
    "learner": ("next", "trained", "next", "trained", "snapshot", "trouble", "beat", "hello"),
    "actor": ("submit", "submit", "submit", "submit", "credit", "live", "fail", "beat", "asleep", "hello", "bye"),
    "scorer": ("annotate", "annotate", "credit", "fail", "beat", "hello", "bye"),
    "evaluator": ("eval", "live", "beat", "hello", "bye"),
    "monitor": ("beat", "dead", "hello", "bye"),
    "recruit": ("muster", "muster", "beat", "hello", "bye"),
}
_LAST = ("done", "fatal", "stop", "bye")
"""What may end the run is said rarely, or there would be nothing else to see."""


class Chunks:
    """A chunk server that serves nobody."""

    address = "tcp://127.0.0.1:1"

    def serve(self, manifest: Manifest) -> None:
        """Nothing."""


class Play:
    """One sequence on one server.

    Args:
        config: of the run.
        folder: for its files.
        journal: whether its ledger keeps a journal, which must give the same ledger back.
    """

    def __init__(self, config: RunConfig, folder: Path, *, journal: bool) -> None:
        self.config = config
        self._journal = folder / "journal" if journal else None
        self._rules = Rules.from_config(config, samples.limits(config))
        ledger = JournaledLedger(self._rules, _task)
        if self._journal is not None:
            journaled.start(ledger, self._journal)
        self.service = Service(config, ledger, RunFiles(folder), Chunks(), "run", 0.0, lambda: None)
        self.now = 0.0
        self.tickets: list[Ticket] = [Ticket(0, 0, 0, 2, 0, 1.0, 0)]
        self.leased: list[Any] = []
        self.newest = samples.manifest(0)
        self.greet()
        self.say(b"L", [packed({"type": "trained", "step": -1, "manifest": self.newest.to_wire(), "stats": {}})])
        for identity in (b"A", b"B"):
            self.say(identity, [packed({"type": "live", "version": 0, "epoch": 0, "checksum": self.newest.checksum})])
            self.say(identity, [packed({"type": "credit", "count": 2})])
        for identity in (b"S", b"R"):
            self.say(identity, [packed({"type": "credit", "count": 2})])

    def greet(self) -> None:
        """All good clients say hello, or hello again."""
        for identity, role, extra in _CAST:
            self.say(identity, [self.hello(role, identity, extra)])

    def hello(self, role: str, identity: bytes, extra: dict[str, Any]) -> bytes:
        """A good one."""
        fields = {"protocol": PROTOCOL_VERSION, "schema": SCHEMA_VERSION, "contract": self.config.contract_hash()}
        fields |= {"role": role, "name": identity.decode(), "pid": 1, "host": "h", "rank": 0, "world": 1}
        return packed({"type": "hello", **fields, "step": 0, "group": "g", **extra})

    def say(self, identity: bytes, frames: list[bytes]) -> None:
        """A message arrives; then what a turn of the server's loop does."""
        self.service.handle(identity, frames, self.now)
        self.service.tell(self.now)
        self.read_post()
        self.service.pump(self.now)
        self.read_post()

    def read_post(self) -> None:
        """What the server sends must be readable for whom it is for, and keep the bound."""
        for _, frames in self.service.post.take():
            header = unpack_header(bytes(frames[0]))
            if header["type"] == "tickets":
                self.tickets = [*self.tickets[-8:], *(Ticket.from_wire(t) for t in header["tickets"])]
            elif header["type"] == "lease":
                self.leased = [*self.leased[-8:], *decode_groups(header, frames[1:])]
            elif header["type"] == "version" and header["manifest"]:
                self.newest = Manifest.from_wire(header["manifest"])
            elif header["type"] == "shard":
                for group in decode_groups(header, frames[1:]):
                    assert 0 <= age(group, header["step"]) <= self._rules.max_staleness, "the bound is broken"

    def build(self, choices: Choices, role: str, kind: str, identity: bytes) -> list[Any]:
        """A message that a good client might send now."""
        ledger, ticket = self.service.ledger, choices.pick(self.tickets[::-1])
        match kind:
            case "hello":
                extra = {"stage": choices.pick(STAGES)} if role == "scorer" else {}
                if role == "learner":
                    extra = {"group": choices.pick(("g", "h", "i")), "step": choices.pick((ledger.version, 0))}
                return [self.hello(role, identity, extra)]
            case "submit":
                return list(encode_groups("submit", [samples.group_for(self.config, ticket)], seq=1))
            case "annotate":
                if not self.leased:
                    return [packed({"type": "annotate", "schema": SCHEMA_VERSION, "groups": []})]
                group = choices.pick(self.leased[::-1])
                stage = choices.pick(STAGES)
                size = len(group) if stage == "reward" else sum(group.lengths)
                values = np.linspace(-1, 0, size, dtype=np.float32)
                made = Annotation(ordinal=group.ordinal, attempt=group.attempt, stage=stage, values=values)
                return list(encode_annotations("annotate", [made], seq=1))
        return [packed({"type": kind, **self._fields(choices, kind, ticket)})]

    def _fields(self, choices: Choices, kind: str, ticket: Ticket) -> dict[str, Any]:
        ledger = self.service.ledger
        match kind:
            case "credit":
                return {"count": 2, "received": choices.below(4)}
            case "fail":
                key = {"ordinal": ticket.ordinal, "attempt": ticket.attempt}
                return {**key, "reason": str(choices.blob(3)), "detail": "d", "final": bool(choices.below(2))}
            case "live":
                newest = self.newest
                times = {"transfer_s": 0.1, "commit_s": 0.1, "pause_s": 0.1}
                return {"epoch": newest.epoch, "version": newest.version, "checksum": newest.checksum, **times}
            case "beat":
                timer = {"state": "idle", "seconds": {"idle": 1.0}, "spans": [["idle", 0.0, 1.0]]}
                return {"timer": timer, "cpu_s": 1.0, "rss_bytes": 1, "in_flight": [[0, 0]], "info": {"n": 1.0}}
            case "next":
                return {"step": ledger.next_step - choices.below(2)}
            case "trained":
                made = samples.manifest(ledger.version + 1, ledger.epoch)
                return {"step": ledger.version, "manifest": made.to_wire(), "stats": {"publish_s": 0.1}}
            case "snapshot":
                return {"path": "checkpoints/.step_1"}
            case "eval":
                return {"version": ledger.version, "epoch": ledger.epoch, "metrics": {"accuracy": 0.5}, "samples": []}
            case "dead":
                return {"name": choices.pick(("A", "S", "L", "E", "nobody"))}
            case "muster":
                return {"settings": shared_settings(self.config), "group": "2 hosts", "store": "h:1"}
            case "done":
                return {"stopped": bool(choices.below(2))}
        return {"reason": "r"}

    def end(self) -> None:
        """What must hold at the end, whatever was said."""
        service, ledger = self.service, self.service.ledger
        books = ledger.books()
        assert books["issued"] == sum(books.values()) - books["issued"], f"the books do not close: {books}"
        assert ledger.held_bytes >= 0
        json.dumps(service.account.books(), allow_nan=False)
        packed(service.account.glance())
        json.dumps(list(service.refused), allow_nan=False)
        if self._journal is not None:
            ledger.detach(remove=False)
            again = replay.recover(self._journal, self._rules, _task, None, self.now)
            assert again.books() == books, f"the journal gives {again.books()} back, it was {books}"
            again.detach(remove=True)
        service.close()


def _with_scorers() -> RunConfig:
    placed = {"placement": "scorer"}
    return samples.token_config(reward=placed, reference=placed, algorithm={"kl_coef": 0.1})


def _task(ordinal: int) -> int:
    return ordinal % samples.NUM_TASKS


def _service(make_config: Callable[[], RunConfig]) -> Callable[[Path], Run]:
    def make(folder: Path) -> Run:
        config, numbers = make_config(), count()

        def run(choices: Choices) -> list[str]:
            out = folder / str(next(numbers))
            play, found = Play(config, out, journal=choices.below(8) == 7), []
            while not choices.spent and len(found) < _MOST_MESSAGES:
                found.append(_step(play, choices))
            play.end()
            shutil.rmtree(out)
            return found or [""]

        return run

    return make


def _step(play: Play, choices: Choices) -> str:
    """One message, or time passes; the reason of its refusal, by whatever way the server told it."""
    if choices.below(16) == 15:
        play.now += choices.pick((0.1, 0.6, 0.6, 5.0, 40.0, 400.0))
        play.service.tick(play.now, all_heard=bool(choices.below(2)))
        play.read_post()
        if choices.below(4):
            play.greet()
        return "time"
    identity, role, _ = choices.pick(_CAST)
    kind = choices.pick(_SAID[role]) if choices.below(32) != 31 else choices.pick(_LAST)
    frames = play.build(choices, role, kind, identity)
    if choices.below(2):
        frames = message(choices, frames)
    if choices.below(16) == 15:
        identity = choices.pick((b"new", b"A", b"L", b"S"))
    before = play.service.refused.copy()
    play.say(identity, [bytes(frame) for frame in frames])
    counted = play.service.refused - before
    return next(iter(counted), "")


def _ledger(folder: Path) -> Run:
    """The ledger alone: its events in any order, with any key, as its callers may call it."""
    kinds = [Rules.from_config(c, samples.limits(c)) for c in (samples.token_config(), _with_scorers())]

    def run(choices: Choices) -> list[str]:
        ledger = JournaledLedger(choices.pick(kinds), _task)
        issued: list[Ticket] = []
        found, now = [], 0.0
        while not choices.spent and len(found) < _MOST_MESSAGES:
            now += choices.pick((0.0, 0.0, 0.5, 40.0, 200.0))
            found.append(_event(ledger, choices, issued, now))
            books = ledger.books()
            assert books["issued"] == sum(books.values()) - books["issued"], books
        return found or [""]

    return run


def _event(ledger: JournaledLedger, choices: Choices, issued: list[Ticket], now: float) -> str:
    actor, scorer = choices.pick(("a", "b")), choices.pick(("s", "t"))
    key = choices.pick(issued[::-1]) if issued else Ticket(0, 0, 0, 2, 0, 1.0, 0)
    ordinal = choices.pick((key.ordinal, key.ordinal, key.ordinal, -1, 1 << 62, key.ordinal + 1))
    attempt = choices.pick((key.attempt, key.attempt, key.attempt + 1, 0))
    match choices.below(11):
        case 0 | 1:
            ticket = ledger.issue(actor, choices.below(ledger.version + 1), now)
            issued.extend([ticket] if ticket else [])
            return "" if ticket else "no_room"
        case 2 | 3:
            frames = encode_groups(
                "submit", [samples.token_group(key.ordinal, key.attempt, key.task_index, key.version)]
            )
            head, *rest = message(choices, list(frames)) if choices.below(2) else [bytes(f) for f in frames]
            try:
                groups = decode_groups(unpack_header(head), rest)
            except WireError as error:
                return error.reason
            answers = [ledger.submit(actor, group, now) for group in groups]
            return answers[0].reason if answers else "empty"
        case 4:
            return ledger.fail(actor, ordinal, attempt, "why", final=bool(choices.below(2))).reason
        case 5:
            ledger.lose(actor)
        case 6 if ledger.rules.stages:
            stage = choices.pick(STAGES)
            ledger.lease(stage, scorer, now)
            values = np.frombuffer(choices.blob(40).ljust(40, b"\0")[: choices.pick((8, 40))], np.float32)
            made = Annotation(ordinal=ordinal, attempt=attempt, stage=stage, values=values)
            return ledger.annotate(scorer, made, now).reason
        case 7:
            ledger.expire(now)
            ledger.watch(now, step_waits=bool(choices.below(2)))
        case 8 if ledger.rules.stages:
            ledger.lose_scorer(scorer, died=bool(choices.below(2)))
        case 9 if ledger.version in ledger.delivered:
            ledger.train(ledger.version)
        case 10:
            delivery = ledger.deliver() if ledger.next_step < ledger.rules.steps else None
            for group in delivery.groups if delivery else ():
                assert 0 <= age(group, ledger.next_step - 1) <= ledger.rules.max_staleness, "the bound is broken"
    return ""


TARGETS = (
    Target("service: tokens", _service(samples.token_config)),
    Target(
        "service: scorers",
        _service(_with_scorers),
    ),
    Target("service: control", _service(samples.control_config)),
    Target("ledger: events", _ledger),
)
